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

// From this magnitude on (in base-2 units) the rounding of a score is handled separately; far above ordinary scores.
inline constexpr float kLargeScore = 0x1p20f;

// `base` for the probabilities 2^(score * scale + base) of a row, from its log-sum-exp. From a magnitude of 2^22 on,
// its rounding could multiply a probability by more than sqrt(2), and in the end overflow; so from there on a margin
// lowers all probabilities by as much. Branch-free, so that loads can move across it.
__device__ __forceinline__ float base_of_lse(float lse) {
  const float base = -lse * kLog2E;
  const float margin = fmaxf(fabsf(base) - 0x1p22f, 0.f) * 0x1p-22f;
  return lse == -INFINITY ? -INFINITY : base - margin;
}

// The logarithm of a sum of exponentials, from their largest exponent and the logarithm of the sum relative to it. The
// relative sum is NaN if the largest exponent is infinite.
__device__ __forceinline__ float log_of_sum(float largest, float log_sum) {
  return largest == INFINITY ? INFINITY : largest + log_sum;
}

// The share of a row's probability mass that an attention sink leaves to the keys: e^lse / (e^lse + e^sink).
__device__ __forceinline__ float share_after_sink(float lse, float sink) {
  return lse == -INFINITY ? 0.f : 1.f / (1.f + exp2_fast((sink - lse) * kLog2E));
}

}  // namespace dsa::sm90
