// Sparse MLA forward: one CTA walks (query, block of heads) items; the heads share the query's gathered keys.
//
// Three warpgroups: one scores, two hold half of O's columns each, add the values and gather. Tiles of 64 keys travel
// through a ring of slots. Each value warpgroup refills the half of a tile that it alone has read last, so nobody
// waits for an empty slot. Q goes through the ring too, as a tile ahead of the item's keys, and O leaves through the
// slot of its last tile, so that consecutive items overlap. wide.cuh and narrow.cuh say who waits for what.
#pragma once

#include <cutlass/cutlass.h>

#include "narrow.cuh"
#include "wide.cuh"

namespace dsa::sparse_mla_fwd {

template <int kConfig>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_fwd_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap out_map) {
  constexpr Config kC = kConfigs[kConfig];
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&out_map);
    constexpr int kFullArrivals = kWarpgroupThreads * (signals_on_landing(kC) ? 2 : 1);
    for (int i = 0; i < kC.front_stages; ++i) barrier_init(&shared.full_front[i], kFullArrivals);
    for (int i = 0; i < kC.back_stages; ++i) {
      barrier_init(&shared.full_back[i], kFullArrivals);
      barrier_init(&shared.probs_written[i], kWarpgroupThreads);
      barrier_init(&shared.probs_turn[i], kWarpgroupThreads);
      barrier_init(&shared.probs_read[i], kWarpgroupThreads);
    }
    for (uint64_t& barrier : shared.finished) barrier_init(&barrier, kWarpgroupThreads);
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    shrink_registers<kC.value_registers>();
    if constexpr (is_narrow(kC)) {
      accumulate_narrow<kC, false>(shared, p, q_map, out_map, thread);
    } else {
      accumulate_wide<kC, false>(shared, p, q_map, out_map, thread);
    }
  } else if (warpgroup == 1) {
    shrink_registers<kC.value_registers>();
    if constexpr (is_narrow(kC)) {
      accumulate_narrow<kC, true>(shared, p, q_map, out_map, thread);
    } else {
      accumulate_wide<kC, true>(shared, p, q_map, out_map, thread);
    }
  } else {
    grow_registers<kC.score_registers>();
    if constexpr (is_narrow(kC)) {
      score_narrow<kC>(shared, p, thread);
    } else {
      score_wide<kC>(shared, p, thread);
    }
  }
}

}  // namespace dsa::sparse_mla_fwd
