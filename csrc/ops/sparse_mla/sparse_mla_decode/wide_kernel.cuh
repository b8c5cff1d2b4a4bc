// Sparse MLA decode with packed keys, for up to 64 heads of an item ("wide"): a persistent CTA walks over items (token,
// part of its keys, block of heads). With more than 64 heads, the two CTAs of a cluster are a pair that walks in step:
// each takes one block of heads of the same token and keys, and unpacks half of each tile's keys for both.
//
// Warp specialization. Who does what, for tile j of all items, 32 keys:
//
//   role           warpgroup  waits on              does                                        signals
//   value (front)  0          raw_full[j + 2]       half of columns [0, 256) of tile j + 2,
//                             probs_written[j]      then O[:, 0:256) = O * rescale + P V and
//                                                   meanwhile the other half                    full, raw_empty[j + 2]
//                                                   after an item's last tile: stores O         probs_read[j]
//   value (back)   1          the same              O[:, 256:512) and the other columns,        the same
//                                                   in the same order
//   score          2          full[j]               S = Q K^T                                   probs_written[j - 1]
//                             probs_read[j - 2]     softmax, P; after an item's last tile: lse  and then [j]
//                                                   and the last factor of O
//   load           3          raw_empty[j - 2]      the packed keys of tile j; two warps        raw_full[j] (by TMA)
//
// In a pair, moreover or instead:
//
//   value          0 and 1    received[j - 1]       writes to the slot of tile j - 1: its 16    raw_empty[j + 2]
//                                                   keys of tile j + 2, before P is awaited     unpacked[j + 2]
//                                                   after P V: the slot of tile j is free       the peer's peer_free[j]
//   send           3          unpacked[j]           one warp for each value warpgroup           full[j]
//                             peer_free[j - 3]      sends what it has unpacked of tile j        the peer's full[j]
//   score          2                                after P: all that the peer sent is here     the peer's received[j]
//
// Packed keys arrive by bulk copies, two tiles ahead of those that are unpacked, and the value warpgroups turn them
// into bf16 (wide_keys.cuh): numbers of e4m3 times the power of two in their scale, which is exact from 2^-124 on. The
// rest of each scale, a factor from 1 to 2, multiplies what a group of 128 columns adds to S (wide_score.cuh), and P:
// each group of value columns has its own P.
//
// Shared memory is what limits the kernel: keys are written, read and written again before the products read them.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/programmatic.cuh"
#include "wide_score.cuh"
#include "wide_values.cuh"

namespace dsa::sparse_mla_decode {

// Two value warpgroups, one that scores, and one of which two warps load, and in a pair two send.
inline constexpr int kWideThreads = 4 * kWarpgroupThreads;
inline constexpr int kStartRegisters = 128, kValueRegisters = 168, kScoreRegisters = 144, kLoadRegisters = 32;
static_assert((2 * kValueRegisters + kScoreRegisters + kLoadRegisters) * kWarpgroupThreads <= 65536);

template <int kColumns, bool kPaired>
__global__ void __launch_bounds__(kWideThreads, 1)
    sparse_mla_decode_wide_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<WideStorage<kColumns, kPaired>*>(shared_bytes_);
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.raw_full) barrier_init(&barrier, kLoadWarps);
    for (uint64_t& barrier : shared.raw_empty) barrier_init(&barrier, 2 * kWarpgroupThreads);
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, kPaired ? 2 : 2 * kWarpgroupThreads);
    for (uint64_t& barrier : shared.probs_written) barrier_init(&barrier, kWarpgroupThreads);
    for (uint64_t& barrier : shared.probs_read) barrier_init(&barrier, 2 * kWarpgroupThreads);
    if constexpr (kPaired) {
      for (uint64_t& barrier : shared.received) barrier_init(&barrier, 1);
      for (int i = 0; i < 2 * kTiles; ++i) {
        barrier_init(&shared.unpacked[0][0] + i, kWarpgroupThreads);
        barrier_init(&shared.peer_free[0][0] + i, kWarpsPerWarpgroup);
      }
    }
    fence_barrier_init();
  }
  if constexpr (kPaired) {
    cute::cluster_sync();  // the peer arrives at these barriers too
  } else {
    __syncthreads();
  }
  launch_dependents();
  wait_for_preceding_kernel();

  if (warpgroup < 2) {
    set_registers<kValueRegisters, kStartRegisters>();
    accumulate_wide(shared, p, warpgroup == 1);
  } else if (warpgroup == 2) {
    set_registers<kScoreRegisters, kStartRegisters>();
    score_wide<kColumns>(shared, p);
  } else {
    set_registers<kLoadRegisters, kStartRegisters>();
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpThreads;
    if (warp < kLoadWarps) {
      load_raw_keys(shared, p);
    } else if constexpr (kPaired) {
      send_keys(shared, p, warp - kLoadWarps == 1);
    }
  }
  if constexpr (kPaired) cute::cluster_sync();  // the peer may still arrive at barriers and read what it sends
}

}  // namespace dsa::sparse_mla_decode
