// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/params.h"

namespace dsa::coarse_attn_fwd {

inline constexpr int kGroups = 3;  // compute warpgroups

struct Params : block_sparse::Problem {
  block_sparse::Heads out;  // like q
  float* lse;               // [batch, heads, seq_q], contiguous
  float* scores;            // [batch, heads, q_blocks, seq_kv], contiguous

  // Per head: triples of blocks, one block per warpgroup; the keys of each remaining block are divided among the three.
  int triples;

  constexpr int singles() const { return q_blocks - kGroups * triples; }
  constexpr int items() const { return batch * heads * (triples + singles()); }
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::coarse_attn_fwd
