// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "plan.h"

namespace dsa::sparse_mla_decode {

struct Params {
  const void* q;           // bf16 [batch, tokens, heads, d_qk]
  const void* kv_cache;    // [pages, page, row]: bf16 of d_qk columns, or packed keys (ops/sparse_mla/packed_keys.h)
  const int* indices;      // [batch, tokens, topk]: page number * page + offset
  const int* topk_length;  // [batch, tokens] or null
  const float* attn_sink;  // [heads] or null

  int64_t q_stride_b, q_stride_n, q_stride_h;  // in elements, like the others
  int64_t page_bytes, slot_bytes;              // from one page, or one slot of a page, to the next
  int64_t indices_stride_b, indices_stride_n;
  int64_t topk_length_stride_b, topk_length_stride_n;
  int64_t attn_sink_stride;

  int batch, tokens, heads, topk, d_qk;
  int page, slots;  // slots of a page and of the cache
  bool is_packed;
  int device;   // CUDA device index
  int num_sms;  // SMs of the device
  float sm_scale;
  float empty_lse;  // lse of a token without keys: -inf or +inf

  Plan plan;
  void* out;   // bf16 [batch, tokens, heads, 512], contiguous
  float* lse;  // [batch, tokens, heads], contiguous
  // Of parts; null unless plan.splits > 1.
  void* partial_out;    // [splits, batch, tokens, heads, 512], fp32; of the wide kernel fp16 in units (see store_part)
  float* partial_lse;   // [splits, batch, tokens, heads]
  float* partial_unit;  // [splits, batch, tokens, heads, 4], of 128 columns each; of the wide kernel only
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::sparse_mla_decode
