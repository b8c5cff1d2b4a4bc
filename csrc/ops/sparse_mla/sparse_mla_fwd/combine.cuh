// Split-KV: combines the parts of queries whose keys were split over CTAs: out = sum_i exp(lse_i - lse) out_i.
#pragma once

#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "storage.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_fwd {

inline constexpr int kCombineThreads = 128;  // one (query, head) row per CTA; four columns per thread

template <bool kMax>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ KernelParams p) {
  const int64_t row = blockIdx.x;
  const int column = threadIdx.x * 4;

  float top = -INFINITY;
  for (int i = 0; i < p.splits; ++i) top = fmaxf(top, p.partial_lse[i * p.rows + row]);
  const float base = top == -INFINITY ? 0.f : top;
  float sum = 0.f;
  float4 out = {0.f, 0.f, 0.f, 0.f};
  for (int i = 0; i < p.splits; ++i) {
    const float weight = sm90::exp2_fast((p.partial_lse[i * p.rows + row] - base) * sm90::kLog2E);
    const float4 part = *reinterpret_cast<const float4*>(p.partial_out + (i * p.rows + row) * p.d_v + column);
    sum += weight;
    out.x += weight * part.x, out.y += weight * part.y, out.z += weight * part.z, out.w += weight * part.w;
  }

  float denominator = sum;
  if (p.attn_sink != nullptr) {
    const float sink = p.attn_sink[row % p.heads * p.attn_sink_stride];
    denominator += sm90::exp2_fast((sink - base) * sm90::kLog2E);
  }
  const bool empty = sum == 0.f;
  const float scale = empty ? 0.f : 1.f / denominator;
  const uint2 packed = {sm90::pack_bf16(out.x * scale, out.y * scale), sm90::pack_bf16(out.z * scale, out.w * scale)};
  *reinterpret_cast<uint2*>(static_cast<char*>(p.out) + (row * p.d_v + column) * 2) = packed;
  if (threadIdx.x == 0) {
    const float empty_lse = kMax ? p.maxima.empty_lse : -INFINITY;
    p.lse[row] = empty ? empty_lse : tiles::log_of_sum(top, sm90::log2_fast(sum) * sm90::kLn2);
    if constexpr (kMax) {
      float largest = -INFINITY;
      for (int i = 0; i < p.splits; ++i) largest = fmaxf(largest, p.maxima.partial_max[i * p.rows + row]);
      p.maxima.max_logits[row] = isnan(sum) && top < INFINITY ? sum : largest;
    }
  }
}

}  // namespace dsa::sparse_mla_fwd
