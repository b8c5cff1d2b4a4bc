// The last steps: dkv from its sums, and the gradient of the sinks.
#pragma once

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/scatter.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kCastThreads = 256;

// One thread for each 16 columns of a row: rounds the sums and puts their columns in order.
__global__ void __launch_bounds__(kCastThreads) cast_kernel(const __grid_constant__ Params p, int64_t pieces) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kCastThreads + threadIdx.x;
  if (piece >= pieces) return;
  float sums[sm90::kScatterColumns];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<float4*>(sums)[i] =
        __ldcs(reinterpret_cast<const float4*>(p.dkv_sum + piece * sm90::kScatterColumns) + i);
  }
  uint32_t packed[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    packed[i] = sm90::pack_bf16(sums[sm90::scattered_place(2 * i)], sums[sm90::scattered_place(2 * i + 1)]);
  }
  uint4* g_dkv = static_cast<uint4*>(p.dkv) + piece * 2;
  g_dkv[0] = {packed[0], packed[1], packed[2], packed[3]};
  g_dkv[1] = {packed[4], packed[5], packed[6], packed[7]};
}

inline constexpr int kSinkHeads = 32, kSinkRows = 32;  // of one block

// The sum of each head's sink terms, always in the same order.
__global__ void __launch_bounds__(kSinkHeads* kSinkRows) sink_kernel(const __grid_constant__ Params p) {
  __shared__ float s_sums[kSinkRows][kSinkHeads];
  const int head = blockIdx.x * kSinkHeads + threadIdx.x;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seq_q;
  float sum = 0.f;
  if (head < p.heads) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kSinkRows) sum += p.sink_terms[row * p.heads + head];
  }
  s_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || head >= p.heads) return;
  for (int i = 1; i < kSinkRows; ++i) sum += s_sums[i][threadIdx.x];
  p.d_sink[head] = sum;
}

}  // namespace dsa::sparse_mla_bwd
