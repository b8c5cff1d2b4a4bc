// Host-to-device parameters of kernels whose queries list their keys. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::listed_keys {

// Query heads are divided among the groups of keys (GQA); each query lists the ids of its keys per group.
struct Problem {
  const void* q;           // bf16 [batch, seq_q, heads, d_qk]
  const void* kv;          // bf16 [batch, seq_kv, groups, d_qk]
  const int* indices;      // [batch, seq_q, groups, topk]
  const int* topk_length;  // [batch, seq_q] or null
  const int* starts;       // [batch, seq_q]: ids from here on are visible; null if causal, q_start and
                           // positions_per_key say which are
  const int* ends;         // like starts: ids below are visible

  // Strides in elements; the last dimension of every tensor has stride 1.
  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t kv_stride_b, kv_stride_s, kv_stride_g;
  int64_t indices_stride_b, indices_stride_s, indices_stride_g;
  int64_t topk_length_stride_b, topk_length_stride_s;
  int64_t starts_stride_b, starts_stride_s, ends_stride_b, ends_stride_s;

  int batch, seq_q, seq_kv, heads, groups, topk, d_qk;
  int device;   // CUDA device index
  int num_sms;  // SMs of the device

  bool causal;
  int64_t q_start;            // position of the first query
  int64_t positions_per_key;  // positions per key: a key is complete at its last one
  float sm_scale;
};

// For kernels that compute one number per listed key, a sum over heads.
struct Params : Problem {
  const float* head_factors;  // [batch, seq_q, heads]: one number per head, lse or weights
  int64_t head_factors_stride_b, head_factors_stride_s, head_factors_stride_h;
  float* sums;  // [batch, seq_q, groups, topk], contiguous; with per_head_block one such tensor per head block
  bool normalize = false, per_head_block = false;
};

}  // namespace dsa::listed_keys
