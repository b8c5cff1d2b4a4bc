// Joins the parts of query blocks whose lists were cut: out = sum_i 2^(lse_i - lse) out_i.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"

namespace dsa::block_sparse_attn_fwd {

using namespace dsa::block_sparse;

inline constexpr int kCombineRows = 4;  // of a CTA, a warp each
inline constexpr int kCombineThreads = kCombineRows * sm90::kWarpThreads;

template <int kColumns>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params p) {
  constexpr int kOfLane = kColumns / sm90::kWarpThreads;
  using Part = std::conditional_t<kOfLane == 4, float4, float2>;
  const int lane = threadIdx.x % sm90::kWarpThreads;
  const int cut_row = blockIdx.x * kCombineRows + threadIdx.x / sm90::kWarpThreads;
  const int cut_item = cut_row / kBlock, row = cut_row % kBlock;
  const Item item(p.plan.whole + cut_item, p.q_blocks, p.heads);
  const int query = item.block * kBlock + row;
  if (query >= p.seq_q) return;

  // Workers that have units of the item are neighbours, between which others may have none.
  const int begin = cut_item * p.plan.units, end = begin + p.plan.units;
  int worker = cut_item * p.plan.workers / p.plan.cut;
  while (first_unit(p.plan, worker + 1) <= begin) ++worker;
  if (first_unit(p.plan, worker) <= begin && first_unit(p.plan, worker + 1) >= end) return;  // it was not cut

  float top = -INFINITY, sum = 0.f, out[kOfLane] = {};
  for (; worker < p.plan.workers && first_unit(p.plan, worker) < end; worker += sm90::kWarpThreads) {
    const int first = max(first_unit(p.plan, worker + lane), begin);
    const bool has_part = worker + lane < p.plan.workers && first < min(first_unit(p.plan, worker + lane + 1), end);
    const int part_row = partial_slot(worker + lane, first - begin) * kBlock + row;
    const float lse = has_part ? p.partial_lse[part_row] : -INFINITY;
    float next = fmaxf(top, lse);
#pragma unroll
    for (int step = 1; step < sm90::kWarpThreads; step *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
    const float base = next == -INFINITY ? 0.f : next, kept = sm90::exp2_fast(top - base);
    const float weight = sm90::exp2_fast(lse - base);
    top = next, sum = sum * kept + weight;
#pragma unroll
    for (float& x : out) x *= kept;
#pragma unroll 4
    for (int i = 0; i < sm90::kWarpThreads; ++i) {
      const float weight_of_part = __shfl_sync(~0u, weight, i);
      const int from = __shfl_sync(~0u, part_row, i);
      if (weight_of_part == 0.f) continue;
      const Part part =
          *reinterpret_cast<const Part*>(p.partial_out + static_cast<int64_t>(from) * kColumns + lane * kOfLane);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) out[j] += weight_of_part * reinterpret_cast<const float*>(&part)[j];
    }
  }
#pragma unroll
  for (int step = 1; step < sm90::kWarpThreads; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float scale = sum == 0.f ? 0.f : 1.f / sum;
  uint32_t* g_row = static_cast<uint32_t*>(p.out.data) + p.out.offset(item.batch, item.head, query) / 2;
#pragma unroll
  for (int j = 0; j < kOfLane; j += 2) {
    g_row[(lane * kOfLane + j) / 2] = sm90::pack_bf16(out[j] * scale, out[j + 1] * scale);
  }
  if (lane == 0) p.lse[item.row(p) + query] = sum == 0.f ? -INFINITY : (top + sm90::log2_fast(sum)) * sm90::kLn2;
}

}  // namespace dsa::block_sparse_attn_fwd
