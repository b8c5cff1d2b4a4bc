// Sparse MLA decode: a persistent CTA walks over items (token, part of its keys, block of heads).
//
// Warp specialization. Who does what, for tile j of an item:
//
//   role           warpgroup  waits on               does                                        signals
//   value (front)  0          full[j]                O[:, 0:256) = O * rescale + P V             probs_read, empty[j]
//                                                    after the last tile: scales and stores O
//   value (back)   1          full[j]                O[:, 256:512), the same                     probs_read, empty[j]
//   score          2          empty[j - 2],          S^T = K Q^T; K as values to stage j % 2     full[j]
//                             probs_read of j - 1    softmax; P, scales and rescale factors
//
// The score warpgroup loads keys from global memory to registers, up to four chunks of 64 columns ahead, and multiplies
// them from there: as operands of S they take no shared memory. Packed keys become bf16 in between: numbers of e4m3
// times the power of two in their scale, which is exact. The rest of each scale, a factor from 1 to 2, multiplies sums
// of S^T after a block of columns, and P; so P V needs P once for every block of columns. The value warpgroups
// make these operands in their registers, from P in fp32.
#pragma once

#include <cutlass/cutlass.h>

#include "score.cuh"
#include "sm90/programmatic.cuh"
#include "value.cuh"

namespace dsa::sparse_mla_decode {

template <int kColumns, int kHeads, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_decode_kernel(const __grid_constant__ KernelParams p) {
  constexpr Config kC{kColumns, kHeads, kPacked};
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int warpgroup = cutlass::canonical_warp_group_idx();

  for (int i = kC.heads * kTileRows + threadIdx.x; i < kRows * kTileRows; i += kThreads) shared.probs[i] = 0.f;
  for (int i = kC.heads + threadIdx.x; i < kRows; i += kThreads) {
    shared.rescale[i] = kExponentOfOne;
    shared.row_max[i] = 0.f;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], kWarpgroupThreads);
      barrier_init(&shared.empty[i], 2 * kWarpgroupThreads);
    }
    barrier_init(&shared.probs_read, 2 * kWarpgroupThreads);
    fence_barrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_preceding_kernel();

  if (warpgroup == 0) {
    accumulate<kC, false>(shared, p);
  } else if (warpgroup == 1) {
    accumulate<kC, true>(shared, p);
  } else {
    score<kC>(shared, p);
  }
}

}  // namespace dsa::sparse_mla_decode
