// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/block_sparse_attn_fwd/plan.h"
#include "ops/block_sparse/params.h"

namespace dsa::block_sparse_attn_fwd {

struct Params : block_sparse::Problem {
  block_sparse::Heads out;  // like q
  float* lse;               // [batch, heads, seq_q], contiguous
  Plan plan;
  float* partial_out;  // [2 teams, kBlock, columns] if lists are split, else null
  float* partial_lse;  // [2 teams, kBlock], base-2 logarithms, or null
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::block_sparse_attn_fwd
