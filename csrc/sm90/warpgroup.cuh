// Warpgroups: register budgets, barriers among their threads, ordering of shared memory towards the tensor cores.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;

// setmaxnreg.inc
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync on a named barrier, for the threads of one warpgroup
template <int kBarrier>
__device__ __forceinline__ void sync_warpgroup() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kWarpgroupThreads) : "memory");
}

// fence.proxy.async: orders this thread's ordinary shared-memory accesses, and those it has synchronised with, before
// later ones of tensor cores and copy engine
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace dsa::sm90
