// Split-KV: combines the parts of query blocks whose lists were split: out = sum_i 2^(lse_i - lse) out_i.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "tiles/softmax.cuh"

namespace dsa::block_sparse_attn_fwd {

using namespace dsa::block_sparse;

inline constexpr int kCombineWarps = 8;  // they share the parts of a row
inline constexpr int kCombineThreads = kCombineWarps * sm90::kWarpThreads;

// One CTA per row.
template <int kColumns>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params p) {
  constexpr int kColumnsPerLane = kColumns / sm90::kWarpThreads;
  using Columns = std::conditional_t<kColumnsPerLane == 4, float4, float2>;
  __shared__ float outs[kCombineWarps][kColumns], tops[kCombineWarps], sums[kCombineWarps];
  const int lane = threadIdx.x % sm90::kWarpThreads, warp = threadIdx.x / sm90::kWarpThreads;
  const int cut_item = blockIdx.x / kBlock, row = blockIdx.x % kBlock;
  const Item item(p.plan.whole + cut_item, p.q_blocks, p.heads);
  const int query = item.block * kBlock + row;
  const int first_team = team_of_unit(p.plan, cut_item * p.plan.units);
  const int parts = team_of_unit(p.plan, (cut_item + 1) * p.plan.units - 1) - first_team + 1;
  sm90::wait_for_preceding_kernel();
  if (query >= p.seq_q || parts == 1) return;

  float top = -INFINITY, sum = 0.f, out[kColumnsPerLane] = {};
#pragma unroll 4
  for (int part = warp; part < parts; part += kCombineWarps) {
    const int from = partial_slot(first_team + part, part == 0) * kBlock + row;
    const float* g_columns = p.partial_out + static_cast<int64_t>(from) * kColumns + lane * kColumnsPerLane;
    const float lse = __ldcg(p.partial_lse + from);
    const Columns columns = __ldcg(reinterpret_cast<const Columns*>(g_columns));
    const float next = fmaxf(top, lse), base = next == -INFINITY ? 0.f : next;
    const float kept = sm90::exp2_fast(top - base), weight = sm90::exp2_fast(lse - base);
    top = next, sum = sum * kept + weight;
#pragma unroll
    for (int j = 0; j < kColumnsPerLane; ++j) {
      out[j] = out[j] * kept + weight * reinterpret_cast<const float*>(&columns)[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kColumnsPerLane; ++j) outs[warp][lane * kColumnsPerLane + j] = out[j];
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  __syncthreads();

  const int column = threadIdx.x;
  if (column >= kColumns) return;
  for (float warp_top : tops) top = fmaxf(top, warp_top);
  const float base = top == -INFINITY ? 0.f : top;
  float total = 0.f, total_sum = 0.f;
#pragma unroll
  for (int i = 0; i < kCombineWarps; ++i) {
    const float weight = sm90::exp2_fast(tops[i] - base);
    total += weight * outs[i][column], total_sum += weight * sums[i];
  }
  const bool is_empty = total_sum == 0.f;
  static_cast<tiles::Bf16*>(p.out.data)[p.out.offset(item.batch, item.head, query) + column] =
      tiles::Bf16(is_empty ? 0.f : total / total_sum);
  if (column == 0) {
    p.lse[item.row(p) + query] = is_empty ? -INFINITY : tiles::log_of_sum(top, sm90::log2_fast(total_sum)) * sm90::kLn2;
  }
}

}  // namespace dsa::block_sparse_attn_fwd
