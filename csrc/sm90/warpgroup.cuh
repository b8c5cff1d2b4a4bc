// Warpgroups: register budgets, named barriers, and the fence between ordinary and tensor-core accesses.
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

// The register budget of a warp role, in a kernel that is launched with kStart registers per thread.
template <int kRegisters, int kStart>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters > kStart) {
    grow_registers<kRegisters>();
  } else {
    shrink_registers<kRegisters>();
  }
}

// Sum over a warp, in a fixed order; every lane gets it.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
}

// shfl.up: inclusive prefix sum of `x` over the lanes of a warp
__device__ __forceinline__ unsigned sum_to_lane(unsigned x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    asm volatile(
        "{\n"
        ".reg .u32 other;\n"
        ".reg .pred exists;\n"
        "shfl.sync.up.b32 other|exists, %0, %1, 0, 0xffffffff;\n"
        "@exists add.u32 %0, %0, other;\n"
        "}\n"
        : "+r"(x)
        : "r"(lanes));
  }
  return x;
}

// bar.sync on a named barrier, for the threads of one warpgroup
template <int kBarrier>
__device__ __forceinline__ void sync_warpgroup() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kWarpgroupThreads) : "memory");
}

__device__ __forceinline__ void sync_warpgroup(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWarpgroupThreads) : "memory");
}

// bar.sync on a named barrier, for a subset of the CTA's threads
template <int kBarrier, int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.red.or: bar.sync, and whether `predicate` holds in any thread of the warpgroup
__device__ __forceinline__ bool any_of_warpgroup(int barrier, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.s32 in, %1, 0;\n"
      "barrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.s32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(predicate)), "r"(barrier), "n"(kWarpgroupThreads)
      : "memory");
  return any;
}

// fence.proxy.async: orders earlier ordinary shared-memory accesses of this thread, and those it has synchronized with,
// before later accesses of the async proxy (wgmma, TMA)
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// fence.proxy.async of global memory: the same for ordinary writes that bulk copies read
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace dsa::sm90
