// Exponentials and logarithms of base 2, as the hardware has them.
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

// What a sink leaves of a row's probability mass: e^lse / (e^lse + e^sink).
__device__ __forceinline__ float share_beside_sink(float lse, float sink) {
  return lse == -INFINITY ? 0.f : 1.f / (1.f + exp2_fast((sink - lse) * kLog2E));
}

}  // namespace dsa::sm90
