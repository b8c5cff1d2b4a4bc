// Running maxima of an online softmax.
#pragma once

#include <cmath>

namespace dsa::tiles {

// Running maxima are raised only when they lag behind by more than kRescaleStep, and then by whole
// numbers, or so far that nothing is left of earlier sums. So O is rarely rescaled, and by powers of two or 0; P stays
// below 2^kRescaleStep, where bf16 has the same relative precision.
inline constexpr float kRescaleStep = 8.f;
inline constexpr int kExponentOfOne = 127;  // exponent bits of 1.f
__device__ __forceinline__ float power_of_two(int exponent_bits) { return __int_as_float(exponent_bits << 23); }
__device__ __forceinline__ float raised_max(float old_max, float top) {
  if (top - old_max >= kExponentOfOne) return top;  // old_max + ceilf might round to less than top
  return top > old_max ? old_max + ceilf(top - old_max) : old_max;
}
// The exponent bits of 2^(old_max - new_max), whose exponent is whole, or 0 below the range of float; those of 1 if the
// maximum was not raised.
__device__ __forceinline__ int rescale_bits(float old_max, float new_max) {
  return kExponentOfOne + (new_max > old_max ? __float2int_rn(fmaxf(old_max - new_max, -127.f)) : 0);
}

}  // namespace dsa::tiles
