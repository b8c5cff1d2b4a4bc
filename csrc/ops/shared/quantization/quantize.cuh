// Quantization of 16-byte pieces to e4m3: y = e4m3(x / s), s = max(amax of a block, 1e-4) / 448.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"

namespace dsa::quantization {

using sm90::Piece;

inline constexpr float kSmallest = 1e-4f, kLargest = 448.f;

__device__ __forceinline__ void to_floats(const Piece& piece, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = sm90::unpack_bf16(piece.words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void to_floats(const Piece& piece, float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(piece.words[i]);
}

// The largest magnitude, as bits: these have the order of magnitudes, with NaN the largest.
template <int kElements>
__device__ __forceinline__ uint32_t largest_of(const Piece& piece) {
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t word : piece.words) {
    largest = kElements == 8 ? __vmaxu2(largest, word & 0x7fff7fffu) : max(largest, word & 0x7fffffffu);
  }
  return kElements == 8 ? max(largest << 16, largest & 0xffff0000u) : largest;
}

// Divides by b with IEEE 754 rounding: with r = 1 / b rounded, a r and one Newton step (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor"), a fraction of the instructions of a division and none
// of its branches. For b between 2^-126 and 2^126, infinite or NaN.
struct Divisor {
  float finite, reciprocal;  // finite: b, or 0, which cancels the Newton step

  __device__ __forceinline__ explicit Divisor(float b) : finite(isfinite(b) ? b : 0.f) {
    const float estimate = sm90::reciprocal_fast(b);
    reciprocal = fmaf(-fmaf(estimate, finite, -1.f), estimate, estimate);
  }
  __device__ __forceinline__ float divides(float a) const {
    const float quotient = a * reciprocal;
    return fmaf(-fmaf(quotient, finite, -a), reciprocal, quotient);
  }
};

__device__ __forceinline__ float scale_of(uint32_t largest, bool round_scale) {
  const float bounded = __uint_as_float(max(largest, __float_as_uint(kSmallest)));
  const float quotient = Divisor(kLargest).divides(bounded);
  const uint32_t rounded_up = (__float_as_uint(quotient) + 0x7fffffu) & 0x7f800000u;
  return !isfinite(bounded) ? bounded : round_scale ? __uint_as_float(rounded_up) : quotient;
}

// A piece of kPairs * 2 numbers as e4m3, in order.
template <int kPairs>
__device__ __forceinline__ void quantize(const Piece& piece, float scale, __nv_fp8x2_storage_t (&pairs)[kPairs]) {
  const Divisor divisor(scale);
  float values[2 * kPairs];
  to_floats(piece, values);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 pair{divisor.divides(values[2 * i]), divisor.divides(values[2 * i + 1])};
    pairs[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
}

}  // namespace dsa::quantization
