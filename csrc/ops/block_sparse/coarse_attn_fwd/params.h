// What crosses from the host to the kernel. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/params.h"

namespace dsa::coarse_attn_fwd {

inline constexpr int kGroups = 3;  // warpgroups that compute

struct Params : block_sparse::Problem {
  block_sparse::Heads out;  // as q
  float* lse;               // [batch, heads, seq_q], contiguous
  float* scores;            // [batch, heads, q_blocks, seq_kv], contiguous

  // Of each head, these blocks are taken together, one by each warpgroup; keys of the others are shared out.
  int triples;

  constexpr int singles() const { return q_blocks - kGroups * triples; }
  constexpr int items() const { return batch * heads * (triples + singles()); }
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::coarse_attn_fwd
