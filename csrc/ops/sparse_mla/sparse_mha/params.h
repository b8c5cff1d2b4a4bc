// Host-to-device parameters that the kernels of sparse multi-head attention share. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::sparse_mha {

inline constexpr int kBlock = 128;                                       // queries, and keys, per tile
inline constexpr int kNope = 128, kRope = 64, kColumns = kNope + kRope;  // of queries and keys
inline constexpr int kValueColumns = 128;

// bf16 [batch, positions, heads, columns]; strides in elements, multiples of 8; the last dimension has stride 1. Data
// is aligned to 16 bytes.
struct Heads {
  void* data;
  int64_t stride_b, stride_s, stride_h;
};

// Which query attends to which key, as bits, in blocks of kBlock queries and keys. What is beyond the last query or key
// is 0.
struct Mask {
  uint32_t* keys;     // [batch, q_blocks * 128, kv_blocks * 4]: of a query; bit i of word w is key 32 w + i
  uint32_t* queries;  // [batch, kv_blocks * 128, q_blocks * 4]: of a key; bit i of word w is query 32 w + i; or null
  uint32_t* tiles;    // [batch, q_blocks, tile_words]: bit i of word w: whether any bit of key block 32 w + i is set
  int q_blocks, kv_blocks, tile_words;
};

struct Problem {
  Heads q;       // [batch, seq_q, heads, kColumns]: columns without RoPE first
  Heads k;       // [batch, seq_kv, heads, kNope]
  Heads k_rope;  // [batch, seq_kv, 1, kRope]
  Heads v;       // [batch, seq_kv, heads, kValueColumns]
  Mask mask;
  int batch, heads, seq_q, seq_kv;
  int device;   // CUDA device index
  int num_sms;  // SMs of the device
  float sm_scale;
};

}  // namespace dsa::sparse_mha
