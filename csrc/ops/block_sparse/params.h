// Host-to-device parameters that the block-sparse kernels share. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::block_sparse {

inline constexpr int kBlock = 64;  // queries, and keys, per block

// bf16 [batch, heads, positions, columns]; strides in elements, the last dimension has stride 1
struct Heads {
  void* data;
  int64_t stride_b, stride_h, stride_n;

  constexpr int64_t offset(int batch, int head, int position) const {
    return batch * stride_b + head * stride_h + position * stride_n;
  }
};

struct Problem {
  Heads q, k, v;
  const int* index;  // [batch, heads, q_blocks, slots]
  const int* num;    // [batch, heads, q_blocks]
  const int* sizes;  // [kv_blocks] or null

  // In elements; the last dimension of index has stride 1.
  int64_t index_stride_b, index_stride_h, index_stride_m;
  int64_t num_stride_b, num_stride_h, num_stride_m;
  int64_t sizes_stride;

  int batch, heads, kv_heads, seq_q, seq_kv, slots, columns;
  int q_blocks, kv_blocks;
  int device;   // CUDA device index
  int num_sms;  // SMs of the device
  float sm_scale;
  float scale_log2;  // |sm_scale| * log2(e), never 0; its sign goes into q instead
};

}  // namespace dsa::block_sparse
