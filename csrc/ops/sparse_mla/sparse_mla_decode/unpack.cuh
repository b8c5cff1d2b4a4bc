// Packed keys to bf16.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sparse_mla/packed_keys.h"
#include "sm90/register_rows.cuh"

namespace dsa::sparse_mla_decode {

using namespace dsa::sm90;
using namespace dsa::sparse_mla;

// What is read in place of keys where there are none: rows of zeros. Many copies of one row at a time would wait for
// each other in L2.
inline constexpr int kZeroRows = 64;
static __device__ const uint4 g_zeros[kZeroRows][packed_bytes(576) / 16] = {};
__device__ __forceinline__ const char* zeros(unsigned row) {
  return reinterpret_cast<const char*>(g_zeros[row % kZeroRows]);
}

// A scale as a power of two and a factor from 1 to 2, or from -2 to -1. A denormal scale has a smaller factor. 0 has
// the power 0 and a factor of 1, by which one may divide. A scale that is infinite or NaN has a factor of NaN: it makes
// all sums of columns of its block NaN.
struct SplitScale {
  uint32_t power;  // as a pair of bf16
  float factor;

  __device__ __forceinline__ explicit SplitScale(float scale) {
    constexpr uint32_t kExponent = 0x7f800000u, kOne = 0x3f800000u, kSmallestNormal = 0x00800000u;
    const uint32_t bits = __float_as_uint(scale), exponent = bits & kExponent;
    power = max(exponent, kSmallestNormal);
    power |= power >> 16;
    const float small = scale * 0x1p126f, normal = __uint_as_float((bits & ~kExponent) | kOne);
    factor = exponent == 0 ? small : normal;
    if (exponent == kExponent) factor = NAN;
    if (scale == 0.f) power = 0, factor = 1.f;
  }
};

// The whole scale as a factor: NaN if it is infinite.
__device__ __forceinline__ float scale_factor(float scale) { return fmaf(scale, 0.f, scale); }

// Eight packed columns as 16 bytes of bf16.
__device__ __forceinline__ uint4 unpack_piece(uint32_t a, uint32_t b) {
  const uint2 low = e4m3_to_bf16(a), high = e4m3_to_bf16(b);
  return {low.x, low.y, high.x, high.y};
}

// Eight columns of bf16 times a number, given twice.
__device__ __forceinline__ uint4 multiply_piece(uint4 v, uint32_t pair) {
  return {multiply_bf16(v.x, pair), multiply_bf16(v.y, pair), multiply_bf16(v.z, pair), multiply_bf16(v.w, pair)};
}

}  // namespace dsa::sparse_mla_decode
