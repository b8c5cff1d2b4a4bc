// Log-sum-exps: from scores, and to probabilities.
#pragma once

#include <cmath>

#include "sm90/math.cuh"

namespace dsa::tiles {

using namespace dsa::sm90;

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

}  // namespace dsa::tiles
