// Split-KV: combines the parts of tokens whose keys were split over CTAs: out = sum_i exp(lse_i - lse) out_i.
#pragma once

#include "items.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kCombineThreads = kValueColumns / 4;  // of a group; a thread has four columns
static_assert(kMaxSplits <= sm90::kWarpThreads, "a lane of each warp weights a part");

// A CTA takes a row, a head of a token. Its groups of threads take parts in turn. In parts of the wide kernel, columns
// alternate: of each 16, the order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
//
// Programmatic dependent launch (PDL): the CTAs wait for the parts.
template <int kGroups, bool kAlternates>
__global__ void __launch_bounds__(kGroups* kCombineThreads) combine_kernel(const __grid_constant__ KernelParams p) {
  const int64_t row = blockIdx.x;
  const int group = threadIdx.x / kCombineThreads, thread = threadIdx.x % kCombineThreads;
  const int lane = threadIdx.x % sm90::kWarpThreads, splits = p.plan.splits;
  const float4* g_parts = reinterpret_cast<const float4*>(p.partial_out + row * kValueColumns) + thread;
  const int64_t part = p.rows * kCombineThreads;
  sm90::wait_for_preceding_kernel();

  // Parts are loaded a batch ahead, the first one while the weights are computed.
  constexpr int kBatch = 4;
  float4 next[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = group + j * kGroups;
    if (i < splits) next[j] = __ldcg(g_parts + i * part);
  }

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
#pragma unroll 1
  for (int first = group; first < splits; first += kBatch * kGroups) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kGroups, later = i + kBatch * kGroups;
      const float w = __shfl_sync(~0u, weight, i);  // i may be past the last part, and past the lanes
      if (i >= splits) break;
      out.x += w * next[j].x, out.y += w * next[j].y, out.z += w * next[j].z, out.w += w * next[j].w;
      if (later < splits) next[j] = __ldcg(g_parts + later * part);
    }
  }
  if constexpr (kGroups > 1) {
    __shared__ float4 sums[kGroups - 1][kCombineThreads];
    if (group > 0) sums[group - 1][thread] = out;
    __syncthreads();
    if (group > 0) return;
    for (const auto& others : sums) {
      const float4 v = others[thread];
      out.x += v.x, out.y += v.y, out.z += v.z, out.w += v.w;
    }
  }
  float denominator = sum;
  if (p.attn_sink != nullptr) {
    const float sink = p.attn_sink[row % p.heads * p.attn_sink_stride];
    denominator += sm90::exp2_fast((sink - base) * sm90::kLog2E);
  }
  const bool empty = sum == 0.f;
  const float scale = empty ? 0.f : 1.f / denominator;
  auto* g_out = reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + row * kValueColumns);
  const uint2 packed = {pack_bf16(out.x * scale, out.y * scale), pack_bf16(out.z * scale, out.w * scale)};
  if constexpr (kAlternates) {
    uint32_t* g_pairs = g_out + thread / 4 * 8 + thread % 4;
    g_pairs[0] = packed.x, g_pairs[4] = packed.y;
  } else {
    reinterpret_cast<uint2*>(g_out)[thread] = packed;
  }
  if (threadIdx.x == 0) {
    p.lse[row] = empty ? p.empty_lse : tiles::log_of_sum(top, sm90::log2_fast(sum) * sm90::kLn2);
  }
}

}  // namespace dsa::sparse_mla_decode
