// Sparse MLA backward: one CTA takes one query's heads of a group, at most 64, over all its keys or a part of them.
//
// Who does what, for tile j of 64 keys:
//
//   warpgroup           waits for                  does                                             signals
//   score               front_full, back_full      S = Q K^T, dP = dO V^T; P, dS
//                       probs_read of tile j-1     writes P and dS                                  probs_written
//                                                  its columns of dkv = P^T dO + dS^T Q             probs_read
//   gradients 0 (front) probs_written              dQ[:, 0:256) and the tail += dS K
//                                                  gathers these columns of tile j+1                front_full
//                                                  its columns of dkv                               probs_read
//   gradients 1 (back)  probs_written              dQ[:, 256:512) += dS K
//                                                  gathers these columns of tile j+1                back_full
//                                                  its columns of dkv                               probs_read
//
// Q, dO, one tile of keys, P and dS fill shared memory. So each gradient warpgroup takes its product with the keys
// first, and while the next tile arrives in their place all work on dkv, which needs no keys. dkv is added to sums in
// global memory, which is what takes the time; or, in a deterministic call, stored as a row for each slot.
//
// Registers of a thread: dQ takes 160 in the front warpgroup and 128 in the back one, a piece of dkv 16 (front) or 32;
// S and dP take 64 in the score warpgroup. ptxas gives the operands of wgmma the registers from 24 upwards.
#pragma once

#include <cutlass/cutlass.h>

#include "gradients.cuh"
#include "score.cuh"

namespace dsa::sparse_mla_bwd {

template <int kConfig, bool kDeterministic>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_bwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap dout_map, const __grid_constant__ CUtensorMap dq_map) {
  constexpr Config kC = kConfigs[kConfig];
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  const Item item(p, blockIdx.x);

  if (threadIdx.x == 0) {
    shared.place = item.place(p);
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&dout_map);
    prefetch_tensor_map(&dq_map);
    barrier_init(&shared.inputs_full, 1);
    barrier_init(&shared.front_full, 2 * kWarpgroupThreads);
    barrier_init(&shared.back_full, 2 * kWarpgroupThreads);
    barrier_init(&shared.probs_written, kWarpgroupThreads);
    barrier_init(&shared.probs_read, kThreads);
    fence_barrier_init();
  }
  __syncthreads();

  constexpr int kStart = kMaxRegisters / 3;
  if (warpgroup == 0) {
    set_registers<kC.registers[kFrontRole], kStart>();
    accumulate<kC, false, kDeterministic>(shared, p, dq_map, thread);
  } else if (warpgroup == 1) {
    set_registers<kC.registers[kBackRole], kStart>();
    accumulate<kC, true, kDeterministic>(shared, p, dq_map, thread);
  } else {
    set_registers<kC.registers[kScoreRole], kStart>();
    score<kC, kDeterministic>(shared, p, item, q_map, dout_map, thread);
  }
}

}  // namespace dsa::sparse_mla_bwd
