// Lists of ids often end in padding, which would take kernels as long as keys. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/shared/listed_keys/params.h"

namespace dsa::list_lengths {

// The fewest slots of a call for which lists are measured. Where nothing is padding, that costs 1 to 2 % of the time of
// so small a call.
inline constexpr int64_t kFewestSlots = 1 << 21;

inline bool are_measured(const listed_keys::Problem& p, int64_t fewest_slots) {
  return p.topk_length == nullptr && int64_t{p.batch} * p.seq_q * p.groups * p.topk >= fewest_slots;
}

// Writes the slots up to the last visible id in any list of a query to `lengths` [batch, seq_q]. Launches on `stream`
// (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const listed_keys::Problem& problem, int* lengths, void* stream);

}  // namespace dsa::list_lengths
