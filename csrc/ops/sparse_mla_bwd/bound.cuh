// How large the addends of deterministic sums can get, which chooses the unit of their fixed point.
//
// A CTA adds sum_h P_h dO_h + dS_h q_h to a key, with P <= 1 and, as no element of O exceeds the largest |v| of the
// query's keys, |dS| <= |scale| (2 d_v max|dO| max|v| + |dlse|).
#pragma once

#include <cuda_bf16.h>

#include <cfloat>
#include <cstdint>

#include "params.h"
#include "sm90/gather.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kBoundThreads = 256, kBoundWarps = kBoundThreads / 32;

// The largest finite magnitude of a row of bf16, in every lane of a warp; and whether all are finite, in some lane.
__device__ __forceinline__ float largest_of_row(const __nv_bfloat16* g_row, int columns, int lane, bool& finite) {
  float largest = 0.f;
  for (int i = lane * 2; i < columns; i += 64) {
    const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(g_row + i));
    const bool x = fabsf(v.x) <= FLT_MAX, y = fabsf(v.y) <= FLT_MAX;
    if (x) largest = fmaxf(largest, fabsf(v.x));
    if (y) largest = fmaxf(largest, fabsf(v.y));
    finite &= x && y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  return largest;
}

// One warp a key.
__global__ void __launch_bounds__(kBoundThreads) key_sizes_kernel(const __grid_constant__ Params p, int64_t keys) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kBoundWarps + threadIdx.x / 32;
  if (key >= keys) return;
  const int64_t group = key % p.groups, position = key / p.groups % p.seq_kv, b = key / p.groups / p.seq_kv;
  const __nv_bfloat16* g_key =
      static_cast<const __nv_bfloat16*>(p.kv) + b * p.kv_stride_b + position * p.kv_stride_s + group * p.kv_stride_g;
  bool finite = true;
  const float largest = largest_of_row(g_key, p.d_v, threadIdx.x % 32, finite);
  if (threadIdx.x % 32 == 0) p.key_sizes[key] = largest;
}

// One block for each query and group.
__global__ void __launch_bounds__(kBoundThreads) bound_kernel(const __grid_constant__ Params p) {
  __shared__ float s_parts[kBoundWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = blockIdx.x % p.groups, s = blockIdx.x / p.groups % p.seq_q, b = blockIdx.x / p.groups / p.seq_q;

  const int slots = sm90::used_slots(
      p.topk, p.topk_length ? p.topk_length + b * p.topk_length_stride_b + s * p.topk_length_stride_s : nullptr);
  const int id_end = sm90::visible_end(p.seq_kv, p.causal, p.q_start, p.positions_per_key, s);
  const int64_t first_key = static_cast<int64_t>(b) * p.seq_kv * p.groups + group;
  const int* g_ids = p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
  float value = 0.f;
  for (int i = threadIdx.x; i < slots; i += kBoundThreads) {
    const int id = g_ids[i];
    if (!sm90::is_visible(id, id_end)) continue;
    value = fmaxf(value, p.key_sizes[first_key + static_cast<int64_t>(id) * p.groups]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  if (lane == 0) s_parts[warp] = value;
  __syncthreads();
  for (int i = 0; i < kBoundWarps; ++i) value = fmaxf(value, s_parts[i]);
  __syncthreads();

  float sum = 0.f;
  bool finite = true;
  const int group_heads = p.heads / p.groups;
  for (int h = warp; h < group_heads; h += kBoundWarps) {
    const int head = group * group_heads + h;
    const int64_t row = (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + head;
    const float q = largest_of_row(
        static_cast<const __nv_bfloat16*>(p.q) + b * p.q_stride_b + s * p.q_stride_s + head * p.q_stride_h, p.d_qk,
        lane, finite);
    const float dout = largest_of_row(static_cast<const __nv_bfloat16*>(p.dout) + row * p.d_v, p.d_v, lane, finite);
    const float dlse = p.dlse != nullptr ? fabsf(p.dlse[row]) : 0.f;
    const float of_head = dout + fabsf(p.sm_scale) * (2.f * p.d_v * dout * value + dlse) * q;
    if (of_head <= FLT_MAX) sum += of_head;
  }
  if (lane == 0) s_parts[warp] = sum;
  // The main kernel sees what is not finite in P and dS, but not 0 times what is not finite in q.
  if (__syncthreads_or(!finite)) {
    for (int i = threadIdx.x; i < slots; i += kBoundThreads) {
      if (sm90::is_visible(g_ids[i], id_end)) p.lost_keys[first_key + static_cast<int64_t>(g_ids[i]) * p.groups] = 1;
    }
  }
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kBoundWarps; ++i) sum += s_parts[i];
  // Twice, for what rounding adds. The bits of floats above zero are in the order of their values.
  atomicMax(reinterpret_cast<int*>(p.addend_bound), __float_as_int(fminf(2.f * sum, FLT_MAX)));
}

}  // namespace dsa::sparse_mla_bwd
