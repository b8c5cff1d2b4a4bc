// Brings the lists of ids into ascending order. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/params.h"

namespace dsa::sparse_mla_bwd {

inline constexpr int kMaxSortedSlots = 8192;  // of a list, which one CTA holds in registers

// Writes the used slots of every list to `sorted` [batch, seq_q, groups, topk], in ascending order; ids that are not
// visible come last, as seq_kv. topk is at most kMaxSortedSlots. Launches on `stream` (a cudaStream_t). Returns null,
// or a text that says what failed.
const char* sort_lists(const sparse_mla::Problem& problem, int* sorted, void* stream);

}  // namespace dsa::sparse_mla_bwd
