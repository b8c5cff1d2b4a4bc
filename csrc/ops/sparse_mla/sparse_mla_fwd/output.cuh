// The end of an item: lse, the last factor of O, and the store of O to global memory.
#pragma once

#include "sm90/math.cuh"
#include "sm90/tma.cuh"
#include "storage.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_fwd {

// Writes lse and returns the factor that turns O into the output, from a head's maximum (times scale), which may lag
// behind, and its sum.
__device__ __forceinline__ float finish_row(const KernelParams& p, const Item& item, int head, float row_max,
                                            float row_sum) {
  const bool exists = head < item.heads_left(p);
  const bool empty = row_sum == 0.f;  // also where all scores are NaN and there is no maximum
  float denominator = row_sum;
  if (exists && p.attn_sink != nullptr && p.splits == 1) {
    const int h = item.group * (p.heads / p.groups) + item.head_block * kBlockHeads + head;
    denominator += exp2_fast(p.attn_sink[h * p.attn_sink_stride] * kLog2E - row_max);
  }
  if (exists) {
    float* g_lse = p.splits == 1 ? p.lse : p.partial_lse + item.split * p.rows;
    g_lse[item.first_row(p) + head] = empty ? -INFINITY : kLn2 * log_of_sum(row_max, log2f(row_sum));
  }
  return empty ? 0.f : 1.f / denominator;
}

// Writes max_logits, from a head's largest score (times scale), and lse of rows without keys. After finish_row.
__device__ __forceinline__ void finish_max(const KernelParams& p, const Item& item, int head, float row_max,
                                           float row_sum, float largest) {
  if (head >= item.heads_left(p)) return;
  const int64_t row = item.first_row(p) + head;
  float* g_max = p.splits == 1 ? p.maxima.max_logits : p.maxima.partial_max + item.split * p.rows;
  // The largest score ignores NaN, the sum does not.
  g_max[row] = isnan(row_sum) && row_max < INFINITY ? row_sum : kLn2 * largest;
  if (row_sum == 0.f && p.splits == 1) p.lse[row] = p.maxima.empty_lse;
}

// Stores to global memory the O that one value warpgroup has written over its values. Called by all its threads.
template <Config kC, bool kBack>
__device__ __forceinline__ void store_output(SharedStorage<kC>& shared, int slot, const CUtensorMap& out_map,
                                             const Item& item, int thread) {
  constexpr int kBarrier = kBack ? kBackBarrier : kFrontBarrier, kFirst = kBack ? kFrontChunks : 0;
  fence_async_proxy();
  sync_warpgroup<kBarrier>();
  if (thread == 0) {
#pragma unroll 1
    for (int chunk = kFirst; chunk < kFirst + kFrontChunks; ++chunk) {
      tma_store(&out_map, shared.tiles.chunk(slot, chunk),
                {chunk * kChunkColumns, item.head_block * kBlockHeads, item.group, item.s, item.b});
    }
    tma_store_commit();
    tma_store_wait_read();
  }
  sync_warpgroup<kBarrier>();
}

}  // namespace dsa::sparse_mla_fwd
