// The last steps: dq of split items, and the gradient of the attention sinks.
#pragma once

#include <cstdint>

#include "merged.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kCombineThreads = 256;

// One thread per 2 columns of a row of a split item: adds up its parts.
template <bool kMerged>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params p, int pairs) {
  const int pair = blockIdx.x * kCombineThreads + threadIdx.x, row_pairs = p.d_qk / 2;
  if (pair >= pairs) return;
  const ItemPlan<kMerged> plan(p);
  const int column = pair % row_pairs * 2, row = pair / row_pairs % kBlockHeads, split = pair / row_pairs / kBlockHeads;
  if (kMerged && split >= plan.split) return;
  const ItemType<kMerged> item(p, plan.whole + split * plan.parts);
  if (!item.has(p, row)) return;
  const float* g_part = p.dq_parts + (int64_t{split} * plan.parts * kBlockHeads + row) * p.d_qk + column;
  float2 sum = {0.f, 0.f};
  for (int part = 0; part < plan.parts; ++part, g_part += kBlockHeads * p.d_qk) {
    const float2 value = *reinterpret_cast<const float2*>(g_part);
    sum.x += value.x, sum.y += value.y;
  }
  static_cast<uint32_t*>(p.dq)[(item.row(p, row) * p.d_qk + column) / 2] = sm90::pack_bf16(sum.x, sum.y);
}

inline constexpr int kSinkHeads = 32, kSinkRows = 32;  // per block

// Adds up each head's sink terms, in a fixed order.
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
