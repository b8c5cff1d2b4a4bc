// What the kernels of sparse MLA have in common of what crosses from the host to them. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::sparse_mla {

struct Problem {
  const void* q;           // bf16 [batch, seq_q, heads, d_qk]
  const void* kv;          // bf16 [batch, seq_kv, groups, d_qk]
  const int* indices;      // [batch, seq_q, groups, topk]
  const int* topk_length;  // [batch, seq_q] or null
  const float* attn_sink;  // [heads] or null

  // Strides in elements; the last dimension of every tensor has stride 1.
  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t kv_stride_b, kv_stride_s, kv_stride_g;
  int64_t indices_stride_b, indices_stride_s, indices_stride_g;
  int64_t topk_length_stride_b, topk_length_stride_s;
  int64_t attn_sink_stride;

  int batch, seq_q, seq_kv, heads, groups, topk, d_qk, d_v;
  int device;   // index of the one that runs the kernels
  int num_sms;  // of that device

  bool causal;
  int64_t q_start;            // position of the first query
  int64_t positions_per_key;  // the op's positions_per_key
  float sm_scale;
};

}  // namespace dsa::sparse_mla
