// Selects the blocks that each row of coarse weights keeps: the first ones by descending weight, ties by ascending id.
// Definition: docs/block_sparse/block_select.md.
//
// No warp specialization: a thread has 16 blocks of a row, and a row as many warps as that takes. Each does, in step:
//
//   sort    the weights alone, without ids, in registers
//   count   how many are kept; the last of these is the threshold
//   write   the ids above the threshold and, of those equal to it, the lowest
//
// Masses are integers, whose sums do not depend on the order of addition, and each operation on doubles is rounded
// separately: so the count is the same on every device.
#pragma once

#include <cuda_bf16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "params.h"
#include "row.cuh"

namespace dsa::block_select {

inline constexpr int kMassBits = 30;  // bits of a row's largest mass
inline constexpr int kWarpItems = 32 * kItems;

// How a CTA is divided. Rows of one warp share a CTA and nothing else.
template <int kWarps_>
struct Shape {
  static constexpr int kWarps = kWarps_, kRows = kWarps == 1 ? 4 : 1, kThreads = 32 * kWarps * kRows;
  static constexpr int kSharedBytes = kWarps == 1 ? 0 : sizeof(Storage<kWarps>);
};

// Loads every 32nd of `left` blocks; zeros after them, which have the highest ids and so are never kept.
template <class T>
__device__ __forceinline__ void load_weights(float (&weights)[kItems], const T* g_scores, int left) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) weights[i] = i * 32 < left ? static_cast<float>(g_scores[i * 32]) : 0.f;
#pragma unroll
  for (float& weight : weights) weight = fminf(fmaxf(weight, 0.f), FLT_MAX);  // fmaxf turns NaN into 0
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The number of blocks that the row keeps, from its sorted weights.
template <int kWarps>
__device__ __forceinline__ int count_kept(const Params& p, const Row<kWarps>& row, const float (&sorted)[kItems]) {
  if (p.topk > 0) return min(p.topk, p.blocks);
  int exponent;  // of the largest weight
  frexpf(row.broadcast(0, sorted[0], row.shared.largest), &exponent);
  const int shift = kMassBits - exponent;  // as two powers of two, because one may exceed fp32
  const float scale = power_of_two(shift / 2), other_scale = power_of_two(shift - shift / 2);
  unsigned masses[kItems];
  long long mass = 0, moment = 0;  // sum of masses; sum of masses times their ranks, from the smallest
  const int rank = p.blocks - row.thread * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    masses[i] = __float2uint_rd(sorted[i] * scale * other_scale);
    mass += masses[i];
    moment += static_cast<long long>(rank - i) * static_cast<int>(masses[i]);
  }
  long long to_lane = mass;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const long long theirs = __shfl_up_sync(~0u, to_lane, lanes);
    to_lane += row.lane >= lanes ? theirs : 0;
    moment += __shfl_xor_sync(~0u, moment, lanes);
  }
  const auto sums = row.sum_warps(__shfl_sync(~0u, to_lane, 31), row.shared.masses);
  moment = row.sum_warps(moment, row.shared.moments).all;

  // A block is needed if those before it do not reach the wanted mass.
  const long long wanted = __double2ll_ru(__dmul_rn(p.tau, __ll2double_rn(sums.all)));
  long long before = sums.before + to_lane - mass;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    count += before < wanted;
    before += masses[i];
  }
  count = row.sum_warps(__reduce_add_sync(~0u, count), row.shared.counts).all;

  const long long n = p.blocks;
  const double gini =
      sums.all == 0 ? 0. : __ddiv_rn(__ll2double_rn(2 * moment - (n + 1) * sums.all), __ll2double_rn(n * sums.all));
  const double ratio = __dsub_rn(p.max_ratio, __dmul_rn(p.ratio_range, gini));
  const int limit = __double2int_ru(__dmul_rn(ratio, static_cast<double>(p.blocks)));
  return max(p.min_blocks, min(count, limit));
}

template <class T, int kWarps>
__global__ void __launch_bounds__(Shape<kWarps>::kThreads) block_select_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char shared_bytes_[];
  const Row<kWarps> row{*reinterpret_cast<Storage<kWarps>*>(shared_bytes_)};
  const int r = blockIdx.x * Shape<kWarps>::kRows + threadIdx.x / (32 * kWarps);
  if (r >= p.rows) return;  // only with rows of one warp, which have no barriers
  const int q_block = r % p.q_blocks, head = r / p.q_blocks % p.heads, batch = r / p.q_blocks / p.heads;
  const T* g_scores =
      static_cast<const T*>(p.scores) + batch * p.batch_stride + head * p.head_stride + q_block * p.q_block_stride;
  int* g_index = p.index + static_cast<int64_t>(r) * p.slots;

  const int first = row.warp * kWarpItems + row.lane;
  float sorted[kItems];
  load_weights(sorted, g_scores + first, p.blocks - first);
  row.sort(sorted);
  const int count = count_kept(p, row, sorted);

  float threshold = INFINITY;  // if none is kept
#pragma unroll
  for (int i = 0; i < kItems; ++i) threshold = row.thread * kItems + i < count ? sorted[i] : threshold;
  threshold = row.broadcast((count - 1) / kItems, threshold, row.shared.threshold);
  float weights[kItems];  // loaded again: there are no registers to keep them
  load_weights(weights, g_scores + first, p.blocks - first);
  int above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    above += weights[i] > threshold;
    equal += weights[i] == threshold;
  }
  const auto sums_above = row.sum_warps(__reduce_add_sync(~0u, above), row.shared.above);
  above = sums_above.before;
  equal = row.sum_warps(__reduce_add_sync(~0u, equal), row.shared.equal).before;

  const int kept_equal = count - sums_above.all;
  const unsigned lanes_before = (1u << row.lane) - 1;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool is_above = weights[i] > threshold, is_equal = weights[i] == threshold;
    const unsigned lanes_above = __ballot_sync(~0u, is_above), lanes_equal = __ballot_sync(~0u, is_equal);
    const int equal_before = equal + __popc(lanes_equal & lanes_before);
    const int place = above + __popc(lanes_above & lanes_before) + min(equal_before, kept_equal);
    if (is_above || (is_equal && equal_before < kept_equal)) g_index[place] = first + i * 32;
    above += __popc(lanes_above);
    equal += __popc(lanes_equal);
  }
  for (int slot = count + row.thread; slot < p.slots; slot += 32 * kWarps) g_index[slot] = -1;
  if (row.thread == 0) p.num[r] = count;
}

}  // namespace dsa::block_select
