// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/params.h"

namespace dsa::block_sparse_attn_bwd {

struct Params : block_sparse::Problem {
  block_sparse::Heads dout, out, dq;  // like q
  block_sparse::Heads dk, dv;         // like k
  const float *lse, *dlse;            // [batch, heads, seq_q]; dlse may be null

  // Scratch. Per block of queries: the bases of its rows' probabilities, then their delta.
  float* rows;  // [batch, heads, q_blocks, 2, kBlock]
  // The query blocks that list a visible block j of keys, ascending: those from offsets[.., j] on.
  int* offsets;  // [batch, heads, kv_blocks + 1]
  int* listing;  // [batch, heads, q_blocks * slots]
  int* taken;    // [2]: blocks taken so far, of queries and of keys
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::block_sparse_attn_bwd
