// What crosses from the host to the kernels. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::sparse_mla_bwd {

struct Params {
  const void* dout;        // bf16 [batch, seq_q, heads, d_v], contiguous
  const void* q;           // bf16 [batch, seq_q, heads, d_qk]
  const void* kv;          // bf16 [batch, seq_kv, groups, d_qk]
  const void* out;         // like dout
  const float* lse;        // [batch, seq_q, heads], contiguous
  const float* dlse;       // like lse, or null
  const int* indices;      // [batch, seq_q, groups, topk]
  const int* topk_length;  // [batch, seq_q] or null
  const float* attn_sink;  // [heads] or null
  void* dq;                // bf16 [batch, seq_q, heads, d_qk], contiguous
  void* dkv;               // bf16 [batch, seq_kv, groups, d_qk], contiguous
  float* d_sink;           // [heads] with a sink, else null
  float* dq_parts;         // fp32 [items beyond whole_items, parts, kBlockHeads, d_qk]
  float* sink_terms;       // like lse with a sink, else null: what each row adds to d_sink
  int* steps;              // [1]: that all CTAs have taken, where waves of them keep in step, else null
  void* dkv_sum;           // fp32, or deterministic int64, like dkv: where the kernel adds; see sm90/scatter.cuh

  // Deterministic sums only, else null.
  float* addend_bound;       // [1]: above what one CTA adds to one sum
  float* key_sizes;          // [batch, seq_kv, groups]: largest magnitude of the values
  unsigned char* lost_keys;  // like key_sizes: not 0 where something infinite, NaN or too large was to be added
  float addend_limit;        // below it, all CTAs' addends together do not overflow

  // Strides in elements; the last dimension of every tensor has stride 1.
  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t kv_stride_b, kv_stride_s, kv_stride_g;
  int64_t indices_stride_b, indices_stride_s, indices_stride_g;
  int64_t topk_length_stride_b, topk_length_stride_s;
  int64_t attn_sink_stride;

  int batch, seq_q, seq_kv, heads, groups, topk, d_qk, d_v;
  int whole_items, parts;  // from plan_items
  int device;              // index of the one that runs the kernels
  int num_sms;             // of that device

  bool deterministic;
  bool prefetch_sums;  // of the next tile, where few are in L2
  bool causal;
  int64_t q_start;            // position of the first query
  int64_t positions_per_key;  // the op's kv_stride
  float sm_scale;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::sparse_mla_bwd
