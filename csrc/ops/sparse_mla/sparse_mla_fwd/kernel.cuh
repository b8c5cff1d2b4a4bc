// Sparse MLA forward: a persistent CTA walks over (query, block of heads) items; the heads share the query's gathered
// keys. If lists are merged, an item is a run of neighboring queries, whose heads share the keys that any of them
// lists.
//
// Warp specialization. Who does what (wide.cuh and narrow.cuh have the barriers tile by tile):
//
//   role           warpgroup  registers  does                          waits on                 signals
//   value (front)  0          160        O[:, 0:256) += P V            probs_written,           probs_read
//                                        gathers columns [0, 256)      probs_turn (wide)        full_front
//                                        scales and stores O           finished
//   value (back)   1          160        O[:, 256:512) += P V          probs_written,
//                                        gathers the other columns     probs_turn (wide)
//                                                                      probs_read               full_back
//                                        scales and stores O           finished
//   score          2          184        S = Q K^T                     full_front, full_back    probs_turn (wide)
//                                        online softmax, P                                      probs_written
//                                        lse, last factor of O                                  finished
//
// Tiles of 64 keys pass through a ring buffer. Each value warpgroup refills the half of a tile of which it is the last
// reader, so nobody waits for an empty stage. Q passes through the ring too, as a tile before the item's keys. O is
// stored from registers, after the first tiles of the next item are on their way, so that consecutive items overlap.
#pragma once

#include <cutlass/cutlass.h>

#include <type_traits>

#include "narrow.cuh"
#include "sm90/programmatic.cuh"
#include "wide.cuh"

namespace dsa::sparse_mla_fwd {

// The configuration for what the kernel takes.
template <class KernelParams>
constexpr Config config_of(int config) {
  if (std::is_same_v<KernelParams, PagedParams>) return with_pages(kConfigs[config]);
  if (std::is_same_v<KernelParams, MergedParams>) return with_merged_lists(kConfigs[config]);
  return kConfigs[config];
}

// With kMax also writes max_logits, and maxima.empty_lse where lse is -inf. With PagedParams, keys are in pages.
template <int kConfig, bool kMax, class KernelParams>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_fwd_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ CUtensorMap q_map) {
  constexpr Config kC = config_of<KernelParams>(kConfig);
  static_assert(!(kC.is_merged && kMax), "finish_max takes items of one query");
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
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
    if constexpr (kC.is_merged) {
      const int* g_counts = p.lists.item_counts;
      shared.listed.first_item = is_narrow(kC) ? g_counts[0] : 0;
      shared.listed.items = g_counts[is_narrow(kC)];
    }
  }
  __syncthreads();
  if constexpr (kC.is_paged) {
    launch_dependents();
    wait_for_preceding_kernel();
  }

  if (warpgroup == 0) {
    shrink_registers<kC.value_registers>();
    if constexpr (is_narrow(kC)) {
      accumulate_narrow<kC, false>(shared, p, q_map, thread);
    } else {
      accumulate_wide<kC, false>(shared, p, q_map, thread);
    }
  } else if (warpgroup == 1) {
    shrink_registers<kC.value_registers>();
    if constexpr (is_narrow(kC)) {
      accumulate_narrow<kC, true>(shared, p, q_map, thread);
    } else {
      accumulate_wide<kC, true>(shared, p, q_map, thread);
    }
  } else {
    grow_registers<kC.score_registers>();
    if constexpr (is_narrow(kC)) {
      score_narrow<kC, kMax>(shared, p, thread);
    } else {
      score_wide<kC, kMax>(shared, p, thread);
    }
  }
}

}  // namespace dsa::sparse_mla_fwd
