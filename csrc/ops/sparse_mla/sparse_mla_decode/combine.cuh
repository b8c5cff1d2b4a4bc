// Split-KV: combines the parts of tokens whose keys were split over CTAs: out = sum_i exp(lse_i - lse) out_i.
#pragma once

#include "items.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kCombineThreads = 128;  // one (token, head) row per CTA; four columns per thread
static_assert(kMaxSplits <= sm90::kWarpThreads, "a lane of each warp weights a part");

// Programmatic dependent launch (PDL): the CTAs wait for the parts.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ KernelParams p) {
  const int64_t row = blockIdx.x;
  const int column = threadIdx.x * 4, lane = threadIdx.x % sm90::kWarpThreads, splits = p.plan.splits;
  const float* g_parts = p.partial_out + row * kValueColumns + column;
  const int64_t part = p.rows * kValueColumns;
  sm90::wait_for_preceding_kernel();

  // Each warp computes the weights of all parts, one per lane.
  const float lse = lane < splits ? __ldcg(p.partial_lse + lane * p.rows + row) : -INFINITY;
  float top = lse;
#pragma unroll
  for (int lanes = sm90::kWarpThreads / 2; lanes > 0; lanes /= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  }
  const float base = top == -INFINITY ? 0.f : top;
  const float weight = sm90::exp2_fast((lse - base) * sm90::kLog2E);
  const float sum = sm90::sum_of_warp(weight);

  float4 out{0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
  for (int i = 0; i < splits; ++i) {
    const float w = __shfl_sync(~0u, weight, i);
    const float4 v = __ldcg(reinterpret_cast<const float4*>(g_parts + i * part));
    out.x += w * v.x, out.y += w * v.y, out.z += w * v.z, out.w += w * v.w;
  }
  float denominator = sum;
  if (p.attn_sink != nullptr) {
    const float sink = p.attn_sink[row % p.heads * p.attn_sink_stride];
    denominator += sm90::exp2_fast((sink - base) * sm90::kLog2E);
  }
  const bool empty = sum == 0.f;
  const float scale = empty ? 0.f : 1.f / denominator;
  auto* g_out = static_cast<Bf16*>(p.out) + row * kValueColumns;
  *reinterpret_cast<uint2*>(g_out + column) = {pack_bf16(out.x * scale, out.y * scale),
                                               pack_bf16(out.z * scale, out.w * scale)};
  if (threadIdx.x == 0) {
    p.lse[row] = empty ? p.empty_lse : tiles::log_of_sum(top, sm90::log2_fast(sum) * sm90::kLn2);
  }
}

}  // namespace dsa::sparse_mla_decode
