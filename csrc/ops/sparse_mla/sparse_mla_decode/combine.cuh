// Split-KV: combines the parts of tokens whose keys were split over CTAs: out = sum_i exp(lse_i - lse) out_i.
#pragma once

#include "items.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_decode {

static_assert(kMaxSplits <= kWarpThreads, "a lane of each warp weights a part");

// What a thread takes of a part: how its columns are stored, and which they are.
struct FloatPart {
  static constexpr int kColumns = 4;
  static constexpr bool kHasUnits = false;
  using Stored = float4;
  static __device__ __forceinline__ void unpack(const Stored& stored, float (&values)[kColumns]) {
    values[0] = stored.x, values[1] = stored.y, values[2] = stored.z, values[3] = stored.w;
  }
  // Writes pairs of columns to a row of the output.
  static __device__ __forceinline__ void write(uint32_t* g_row, int thread, const uint32_t (&pairs)[kColumns / 2]) {
    reinterpret_cast<uint2*>(g_row)[thread] = {pairs[0], pairs[1]};
  }
};

// Of the wide kernel. Of each 32 columns, the order is 0 1 8 9 16 17 24 25 2 3 10 11 ... 30 31.
struct HalfPart {
  static constexpr int kColumns = 8;
  static constexpr bool kHasUnits = true;
  using Stored = uint4;
  static __device__ __forceinline__ void unpack(const Stored& stored, float (&values)[kColumns]) {
    const uint32_t pairs[] = {stored.x, stored.y, stored.z, stored.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_fp16(pairs[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ void write(uint32_t* g_row, int thread, const uint32_t (&pairs)[kColumns / 2]) {
    uint32_t* g_first = g_row + thread / 4 * 16 + thread % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) g_first[4 * i] = pairs[i];
  }
};

// Groups of threads, each of which takes whole parts. All but the first leave their sums in shared memory.
template <int kThreads, class Part>
inline constexpr int kGroupsOf = kThreads * Part::kColumns / kValueColumns;
template <int kThreads, class Part>
inline constexpr int kSumBytes = (kGroupsOf<kThreads, Part> - 1) * kValueColumns * int{sizeof(float)};

// A CTA takes a row, a head of a token. Its groups of threads take parts in turn.
//
// Programmatic dependent launch (PDL): the CTAs wait for the parts.
template <int kThreads, class Part>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kColumns = Part::kColumns, kGroupThreads = kValueColumns / kColumns;
  constexpr int kGroups = kGroupsOf<kThreads, Part>;
  using Stored = typename Part::Stored;
  const int64_t row = blockIdx.x;
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int lane = threadIdx.x % kWarpThreads, splits = p.plan.splits;
  const Stored* g_parts = static_cast<const Stored*>(p.partial_out) + row * kGroupThreads + thread;
  const int64_t part = p.rows * kGroupThreads;
  wait_for_preceding_kernel();

  // Each warp computes the weights of all parts, one per lane.
  const int64_t lane_row = lane * p.rows + row;
  const float lse = lane < splits ? __ldcg(p.partial_lse + lane_row) : -INFINITY;
  float2 units{1.f, 1.f};  // of the first and the second half of the warp's columns
  if constexpr (Part::kHasUnits) {
    static_assert(kWarpThreads * kColumns == 2 * kScaleColumns);
    const auto* g_units = reinterpret_cast<const float2*>(p.partial_unit) + thread / kWarpThreads;
    if (lane < splits) units = __ldcg(g_units + lane_row * (kScaleGroups / 2));
  }

  // Parts are loaded a batch ahead, the first one while the weights are computed.
  constexpr int kBatch = 4;
  Stored next[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = group + j * kGroups;
    if (i < splits) next[j] = __ldcg(g_parts + i * part);
  }

  float top = lse;
#pragma unroll
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const float base = top == -INFINITY ? 0.f : top;
  const float weight = exp2_fast((lse - base) * kLog2E);
  const float sum = sum_of_warp(weight);

  float out[kColumns] = {};
#pragma unroll 1
  for (int first = group; first < splits; first += kBatch * kGroups) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kGroups, later = i + kBatch * kGroups;
      float w = __shfl_sync(~0u, weight * units.x, i);  // i may be past the last part, and past the lanes
      if constexpr (Part::kHasUnits) {
        const float of_second_half = __shfl_sync(~0u, weight * units.y, i);
        if (lane >= kWarpThreads / 2) w = of_second_half;
      }
      if (i >= splits) break;
      float values[kColumns];
      Part::unpack(next[j], values);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[c] += w * values[c];
      if (later < splits) next[j] = __ldcg(g_parts + later * part);
    }
  }
  if constexpr (kGroups > 1) {
    extern __shared__ float4 sums[];  // [kGroups - 1, kColumns / 4, kGroupThreads]
    float4* const others = sums + thread;
    if (group > 0) {
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) {
        others[((group - 1) * kColumns + c) / 4 * kGroupThreads] = {out[c], out[c + 1], out[c + 2], out[c + 3]};
      }
    }
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int i = 0; i < (kGroups - 1) * kColumns; i += 4) {
      const float4 v = others[i / 4 * kGroupThreads];
      const int c = i % kColumns;
      out[c] += v.x, out[c + 1] += v.y, out[c + 2] += v.z, out[c + 3] += v.w;
    }
  }
  float denominator = sum;
  if (p.attn_sink != nullptr) {
    const float sink = p.attn_sink[row % p.heads * p.attn_sink_stride];
    denominator += exp2_fast((sink - base) * kLog2E);
  }
  const bool empty = sum == 0.f;
  const float scale = empty ? 0.f : 1.f / denominator;
  uint32_t pairs[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) pairs[i] = pack_bf16(out[2 * i] * scale, out[2 * i + 1] * scale);
  Part::write(reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + row * kValueColumns), thread, pairs);
  if (threadIdx.x == 0) p.lse[row] = empty ? p.empty_lse : log_of_sum(top, log2_fast(sum) * kLn2);
}

}  // namespace dsa::sparse_mla_decode
