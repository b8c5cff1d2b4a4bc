// Sparse MLA backward: one CTA takes a block of at most 64 heads of a query's group, over all its keys or a part of
// them (split items).
//
// Warp specialization: three warpgroups. Who does what, for tile j of 64 keys (registers for d_qk = 576 / 512):
//
//   role             warpgroup  registers  does                                   waits on               signals
//   gradients front  0          208 / 200  dQ[:, 0:256) and the tail += dS K      inputs_full (once),    front_full
//                                          gathers these columns of tile j+1      probs_written
//                                          its columns of dkv                                            probs_read
//   gradients back   1          192 / 192  dQ[:, 256:512) += dS K                 inputs_full (once),    back_full
//                                          gathers these columns of tile j+1      probs_written
//                                          its columns of dkv                                            probs_read
//   score            2          104 / 112  loads Q and dO (TMA, one thread)                              inputs_full
//                                          S = Q K^T, dP = dO V^T; P, dS          inputs_full (once),
//                                                                                 front_full, back_full
//                                          writes P and dS                        probs_read of j-1      probs_written
//                                          its columns of dkv = P^T dO + dS^T Q   probs_written          probs_read
//
// Q, dO, one tile of keys, P and dS fill shared memory. So each gradient warpgroup first takes its product with the
// keys; while the next tile arrives in their place, all warpgroups compute dkv, which needs no keys. dkv is added to
// fp32 sums in global memory, which is the bottleneck; in a deterministic call it is stored as one row per slot
// instead.
//
// With merged lists (merged.cuh), an item is a run of queries with few heads or a single query; the front warpgroup
// also writes which keys each query lists, and the score warpgroup clears P and dS of others.
//
// Accumulator registers per thread: dQ takes 160 in the front warpgroup and 128 in the back one, a piece of dkv 16
// (front) or 32; S and dP take 64 in the score warpgroup. ptxas assigns wgmma operands to registers from 24 upwards.
#pragma once

#include <cutlass/cutlass.h>

#include "gradients.cuh"
#include "score.cuh"

namespace dsa::sparse_mla_bwd {

template <Config kC, bool kDeterministic, bool kDist>
__device__ __forceinline__ void run_roles(const Params& p, const MapsOf<kC>& maps) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  const ItemOf<kC> item(p, blockIdx.x);

  if (threadIdx.x == 0) {
    shared.place = item.place(p);
    if constexpr (kC.merged) shared.merged = item.merged_rows();
    prefetch_tensor_map(&maps.of_item(shared).q);
    prefetch_tensor_map(&maps.of_item(shared).dout);
    prefetch_tensor_map(&maps.of_item(shared).dq);
    barrier_init(&shared.inputs_full, 1);
    barrier_init(&shared.front_full, 2 * kWarpgroupThreads);
    barrier_init(&shared.back_full, 2 * kWarpgroupThreads);
    barrier_init(&shared.probs_written, kWarpgroupThreads);
    barrier_init(&shared.probs_read, kThreads);
    fence_barrier_init();
  }
  if constexpr (kDist) {
    if (threadIdx.x < kOnes) shared.ones[threadIdx.x] = Bf16(1.f);
    fence_async_proxy();
  }
  __syncthreads();

  constexpr int kStart = kMaxRegisters / 3;
  if (warpgroup == 0) {
    set_registers<kC.registers[kFrontRole], kStart>();
    accumulate<kC, false, kDeterministic>(shared, p, maps, thread);
  } else if (warpgroup == 1) {
    set_registers<kC.registers[kBackRole], kStart>();
    accumulate<kC, true, kDeterministic>(shared, p, maps, thread);
  } else {
    set_registers<kC.registers[kScoreRole], kStart>();
    score<kC, kDeterministic, kDist>(shared, p, item, maps, thread);
  }
}

template <int kConfig, bool kDeterministic, bool kDist>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_bwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap dout_map, const __grid_constant__ CUtensorMap dq_map) {
  run_roles<kConfigs[kConfig], kDeterministic, kDist>(p, {q_map, dout_map, dq_map});
}

template <int kConfig>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_bwd_merged_kernel(const __grid_constant__ Params p, const __grid_constant__ MergedMaps maps) {
  if (blockIdx.x >= ItemPlan<true>(p).ctas()) return;
  run_roles<kConfigs[kConfig], false, false>(p, maps);
}

}  // namespace dsa::sparse_mla_bwd
