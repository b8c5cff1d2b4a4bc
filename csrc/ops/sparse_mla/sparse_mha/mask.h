// Makes masks from lists of keys. No torch, no CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/sparse_mla/sparse_mha/params.h"

namespace dsa::sparse_mha {

// The keys that each query lists, and which of them it sees.
struct Lists {
  const int* ids;            // [batch, seq_q, topk]
  const int *starts, *ends;  // [batch, seq_q] or null
  int64_t ids_stride_b, ids_stride_s, starts_stride_b, starts_stride_s, ends_stride_b, ends_stride_s;
  int batch, seq_q, seq_kv, topk;
  int64_t q_start;
  int64_t window;  // with causal: how many positions up to its own a query sees; kNoWindow if all
  bool causal;
  int positions_per_key = 1;
};

inline constexpr int64_t kNoWindow = INT64_MAX;

// How many blocks of keys a block of queries sees at most.
inline int64_t most_key_blocks(const Lists& lists, const Mask& mask, int64_t block) {
  if (!lists.causal || lists.starts != nullptr) return mask.kv_blocks;
  const int64_t first = lists.q_start + block * kBlock;  // position
  const int64_t begin = std::max<int64_t>(0, first + 1 - lists.window) / kBlock;
  const int64_t end = std::min<int64_t>((first + kBlock - 1) / kBlock + 1, mask.kv_blocks);
  return std::max<int64_t>(0, end - begin);
}

// Fills all parts of the mask that are not null. Returns null, or a text that says what failed.
const char* launch_mask(const Mask& mask, const Lists& lists, int device, void* stream);

}  // namespace dsa::sparse_mha
