// What crosses from the host to kernels whose queries list their keys. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::listed_keys {

// Heads of queries are shared out to groups of keys; each query lists the ids of its keys, group by group.
struct Problem {
  const void* q;           // bf16 [batch, seq_q, heads, d_qk]
  const void* kv;          // bf16 [batch, seq_kv, groups, d_qk]
  const int* indices;      // [batch, seq_q, groups, topk]
  const int* topk_length;  // [batch, seq_q] or null

  // Strides in elements; the last dimension of every tensor has stride 1.
  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t kv_stride_b, kv_stride_s, kv_stride_g;
  int64_t indices_stride_b, indices_stride_s, indices_stride_g;
  int64_t topk_length_stride_b, topk_length_stride_s;

  int batch, seq_q, seq_kv, heads, groups, topk, d_qk;
  int device;   // index of the one that runs the kernels
  int num_sms;  // of that device

  bool causal;
  int64_t q_start;            // position of the first query
  int64_t positions_per_key;  // a key is complete at its last position
  float sm_scale;
};

// Of the kernels that give each listed key one number, a sum over heads.
struct Params : Problem {
  const float* of_heads;  // one number per head, [batch, seq_q, heads]: lse, or weights
  int64_t of_heads_stride_b, of_heads_stride_s, of_heads_stride_h;
  float* sums;  // [batch, seq_q, groups, topk], contiguous; or as many for each block of heads of a group
  bool normalize = false, per_head_block = false;
};

}  // namespace dsa::listed_keys
