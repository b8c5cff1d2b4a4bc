// What crosses from the host to the kernel. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/params.h"

namespace dsa::listed_keys {

struct Params : sparse_mla::Problem {
  const float* of_heads;  // one number a head, [batch, seq_q, heads]: lse, or weights
  int64_t of_heads_stride_b, of_heads_stride_s, of_heads_stride_h;
  float* sums;  // [batch, seq_q, groups, topk], contiguous; or as many for each block of heads of a group
  bool normalize = false, per_head_block = false;
};

}  // namespace dsa::listed_keys
