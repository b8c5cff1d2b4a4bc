// Makes masks from lists of keys. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/sparse_mha/params.h"

namespace dsa::sparse_mha {

// The keys that each query lists, and which of them it sees.
struct Lists {
  const int* ids;            // [batch, seq_q, topk]
  const int *starts, *ends;  // [batch, seq_q] or null
  int64_t ids_stride_b, ids_stride_s, starts_stride_b, starts_stride_s, ends_stride_b, ends_stride_s;
  int batch, seq_q, seq_kv, topk;
  int64_t q_start;
  bool causal;
  int positions_per_key = 1;
};

// Fills all parts of the mask that are not null. Returns null, or a text that says what failed.
const char* launch_mask(const Mask& mask, const Lists& lists, int device, void* stream);

}  // namespace dsa::sparse_mha
