// What crosses from the host to the kernel. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/params.h"

namespace dsa::attn_dist {

struct Params : sparse_mla::Problem {
  const float* lse;  // [batch, seq_q, heads]
  int64_t lse_stride_b, lse_stride_s, lse_stride_h;
  float* dist;  // [batch, seq_q, groups, topk], contiguous; or as many for each block of heads of a group
  bool normalize, per_head_block;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::attn_dist
