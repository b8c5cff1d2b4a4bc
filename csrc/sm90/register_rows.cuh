// Rows that pass through registers: loads from global memory, conversion from e4m3, stores to shared memory.
#pragma once

#include <cstdint>

#include "matrix_copy.cuh"

namespace dsa::sm90 {

// ld.global.nc of 16 bytes that are not read again: they do not stay in L1
__device__ __forceinline__ uint4 load_once(const void* g) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(g));
  return r;
}

// cvt.rn.f16x2.e4m3x2: four numbers of e4m3
__device__ __forceinline__ uint2 e4m3_to_fp16(uint32_t word) {
  uint2 r;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(r.x), "=r"(r.y)
      : "r"(word));
  return r;
}

// cvt.rn.f16x2: a pair, `low` in the lower half
__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16: a pair
__device__ __forceinline__ float2 unpack_fp16(uint32_t pair) {
  float2 r;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(r.x), "=f"(r.y)
      : "r"(pair));
  return r;
}

// Four numbers of e4m3 as two pairs of bf16, which is exact. There is no direct conversion.
__device__ __forceinline__ uint2 e4m3_to_bf16(uint32_t word) {
  const uint2 pairs = e4m3_to_fp16(word);
  const float2 low = unpack_fp16(pairs.x), high = unpack_fp16(pairs.y);
  return {pack_bf16(low.x, low.y), pack_bf16(high.x, high.y)};
}

// mul.rn.bf16x2
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// st.shared of 16 bytes
__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// ld.shared, wherever it stands in the code: the compiler neither moves it nor keeps its result for later
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint4 load_shared_words(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

}  // namespace dsa::sm90
