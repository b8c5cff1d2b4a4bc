// Single loads, stores and prefetches that CUDA C++ has no intrinsic for.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "matrix_copy.cuh"

namespace dsa::sm90 {

// prefetch.L2 of a cache line
__device__ __forceinline__ void prefetch_l2(const void* g) { asm volatile("prefetch.global.L2 [%0];" ::"l"(g)); }

// cp.async.bulk.prefetch.L2: `bytes` is a multiple of 16
__device__ __forceinline__ void prefetch_l2(const void* g, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g), "r"(bytes) : "memory");
}

// ld.global that brings the surrounding 256 bytes into L2, where other warps will need them
__device__ __forceinline__ float2 load_and_prefetch_256(const float* g) {
  float2 r;
  asm volatile("ld.global.nc.L2::256B.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(g));
  return r;
}

// cp.async of 4 bytes
__device__ __forceinline__ void copy_float(float* shared, const float* g) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(g) : "memory");
}

// cp.async of 16 bytes, bypassing L1; writes zeros and reads nothing when `bytes` is 0. (A 256-byte L2 prefetch hint
// costs bandwidth when the rows come from HBM: half of what it fetches belongs to other rows.)
__device__ __forceinline__ void copy_16_bytes(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.commit_group: this thread's copies since the last group become a group, which may be empty
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until this thread's groups of copies are complete, except for the last kLater
template <int kLater>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// st.shared
__device__ __forceinline__ void store_shared(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, __nv_bfloat16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(__bfloat16_as_ushort(value)) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// red.global.add.v4.f32, unless `id` is negative
__device__ __forceinline__ void add_to_global(float* g_sum, int id, float a, float b, float c, float d) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ge.s32 wanted, %1, 0;\n"
      "@wanted red.global.add.v4.f32 [%0], {%2, %3, %4, %5};\n"
      "}\n" ::"l"(g_sum),
      "r"(id), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// red.shared.add of 1
__device__ __forceinline__ void increment(uint32_t address) {
  asm volatile("red.shared::cta.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

}  // namespace dsa::sm90
