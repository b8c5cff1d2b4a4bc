// Base-2 exponentials and logarithms, and other arithmetic of the hardware's own instructions.
#pragma once

#include <cmath>

namespace dsa::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// ex2.approx
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max.NaN with 0: NaN stays NaN
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// set.gt: 1 or 0
__device__ __forceinline__ float one_if_greater(float a, float b) {
  float r;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// lop3: x ^ (~mask | 0x80000000)
__device__ __forceinline__ unsigned xor_not_or_sign(unsigned x, unsigned mask) {
  unsigned r;
  asm("lop3.b32 %0, %1, %2, 0x80000000, 0x4b;" : "=r"(r) : "r"(x), "r"(mask));
  return r;
}

}  // namespace dsa::sm90
