// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/sparse_mha/params.h"

namespace dsa::sparse_mha_bwd {

struct Params : sparse_mha::Problem {
  sparse_mha::Heads dout, out;  // [batch, seq_q, heads, kValueColumns]
  const float* lse;             // [batch, seq_q, heads], contiguous
  const float* dlse;            // like lse, or null
  sparse_mha::Heads dq;         // like q, contiguous
  sparse_mha::Heads dk, dv;     // like k and v, contiguous
  void* dk_rope;                // bf16 [batch, seq_kv, kRope], contiguous
  // Workspace.
  float* rows;             // [batch, heads, q_blocks * 2, 2, 64]: bases of probabilities, and delta
  int* tile_offsets;       // like mask.tiles: how many bits of its batch are set in the words before
  void* dscores;           // bf16: [buffers, batch, heads_at_once, tiles_per_head, kTileBytes]
  float* dk_rope_parts;    // [divide_up(heads, heads_together), batch, seq_kv, kRope]
  int64_t tiles_per_head;  // at least the number of bits that are set in mask.tiles, in each batch
  int heads_at_once;       // whose dS are in one buffer; a multiple of heads_together
  int heads_together;      // in one part of dk_rope
};

// The most buffers of dS; heads use them in turn (launch.cu).
inline constexpr int kBuffers = 3;
// dS of 128 queries and 128 keys
inline constexpr int kTileBytes = sparse_mha::kBlock * sparse_mha::kBlock * 2;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::sparse_mha_bwd
