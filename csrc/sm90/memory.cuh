// Single loads, stores and prefetches that CUDA C++ has no intrinsic for.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "matrix_copy.cuh"

namespace dsa::sm90 {

// prefetch.L2
__device__ __forceinline__ void prefetch_l2(const void* g) { asm volatile("prefetch.global.L2 [%0];" ::"l"(g)); }

// ld.global, only to bring the line into L1; the value is not used
__device__ __forceinline__ void touch(const float* g) {
  [[maybe_unused]] float unused;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(unused) : "l"(g));
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

// red.shared.add of 1
__device__ __forceinline__ void increment(uint32_t address) {
  asm volatile("red.shared::cta.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

}  // namespace dsa::sm90
