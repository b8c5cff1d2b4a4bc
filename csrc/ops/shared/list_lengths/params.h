// Lists of ids often end in padding, which would take kernels as long as keys. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/shared/listed_keys/params.h"

namespace dsa::list_lengths {

// The fewest slots of a call that finds the lengths of its lists; of sparse_mla_decode. With full lists, finding them
// would make smaller calls 2 to 4 % slower.
inline constexpr int64_t kFewestSlots = 1 << 21, kFewestDecodeSlots = 1 << 18;
// The fewest queries. One warp reads the lists of a query, so a few long lists would take long.
inline constexpr int64_t kFewestQueries = 64;

// Whether the lengths, which are not given, are found.
inline bool are_found(const listed_keys::Problem& p, int64_t fewest_slots) {
  const int64_t queries = int64_t{p.batch} * p.seq_q;
  return p.topk_length == nullptr && queries >= kFewestQueries && queries * p.groups * p.topk >= fewest_slots;
}

// Writes, for each query, the number of slots up to the last visible id in any of its lists to `lengths` [batch,
// seq_q]. Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const listed_keys::Problem& problem, int* lengths, void* stream);

}  // namespace dsa::list_lengths
