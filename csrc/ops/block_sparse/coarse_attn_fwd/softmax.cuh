// Sums of the exponentials of rows of scores, over tiles, lanes and warpgroups.
#pragma once

#include <cmath>
#include <limits>

#include "ops/block_sparse/params.h"
#include "params.h"
#include "sm90/math.cuh"

namespace dsa::coarse_attn_fwd {

using namespace dsa::block_sparse;
using namespace dsa::sm90;

// As a base-2 logarithm: from here on the rounding of a log-sum-exp would show in probabilities.
inline constexpr float kLargeLse = 0x1p8f;

// (score - top) * scale, for scores up to `top`. If the scaled top is large, the difference is taken first, so that no
// product is rounded; otherwise the product, so that the difference cannot overflow.
struct Exponent {
  float factor, offset, scale;

  __device__ __forceinline__ Exponent(float top, float scale_log2)
      : factor(scale_log2), offset(-top * scale_log2), scale(1.f) {
    if (!(fabsf(offset) <= kLargeLse)) factor = 1.f, offset = -top, scale = scale_log2;
  }
  __device__ __forceinline__ float operator()(float score) const { return fmaf(score, factor, offset) * scale; }
  // For another top, whose product is rounded as it was in the exponents relative to it.
  __device__ __forceinline__ float exponent_of_top(float top) const {
    return (__fmul_rn(top, factor) + offset) * scale;
  }
};

// Sum of a row's exponentials, relative to its largest score so far, or to an earlier one while fp32 allows it.
struct RowSum {
  float top, sum;

  __device__ __forceinline__ void move_top(float next, float scale_log2) {
    sum *= exp2_fast(Exponent(next, scale_log2).exponent_of_top(top));
    top = next;
  }
  // Combines the four lanes of a row.
  __device__ __forceinline__ void add_lanes(float scale_log2) {
    float best = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    move_top(best, scale_log2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
};

inline constexpr RowSum kNoKeys{std::numeric_limits<float>::lowest(), 0.f};

// Those of the two rows of which a lane has scores.
struct RowSums {
  RowSum rows[2] = {kNoKeys, kNoKeys};

  // Adds a tile's scores, without looking for a new top as long as the sums do not grow much.
  template <class Scores>
  __device__ __forceinline__ void add(const Scores& r_s, float scale_log2) {
    constexpr float kLimit = 0x1p40f;
    if (!(rows[0].sum > 0.f && rows[1].sum > 0.f)) raise_tops(r_s, scale_log2);
    float sums[2];
    const float base[2] = {-rows[0].top * scale_log2, -rows[1].top * scale_log2};
    sum_rows(r_s, [&](float score, int r) { return exp2_fast(fmaf(score, scale_log2, base[r])); }, sums);
    if (!(sums[0] <= kLimit && sums[1] <= kLimit && fmaxf(fabsf(base[0]), fabsf(base[1])) <= kLargeLse)) {
      raise_tops(r_s, scale_log2);
      const Exponent exponents[2] = {{rows[0].top, scale_log2}, {rows[1].top, scale_log2}};
      sum_rows(r_s, [&](float score, int r) { return exp2_fast(exponents[r](score)); }, sums);
    }
    rows[0].sum += sums[0], rows[1].sum += sums[1];
  }
  // Combines the four lanes of each row.
  __device__ __forceinline__ void add_lanes(float scale_log2) {
    for (RowSum& row : rows) row.add_lanes(scale_log2);
  }
  // The sums of row `row`, and of the eighth after it, over the warpgroups.
  __device__ __forceinline__ void join(const RowSum (&parts)[kGroups][kBlock], int row, float scale_log2) {
    for (int r = 0; r < 2; ++r) {
      float best = kNoKeys.top;
      for (const auto& group_sums : parts) best = fmaxf(best, group_sums[row + 8 * r].top);
      rows[r] = {best, 0.f};
      for (const auto& group_sums : parts) {
        RowSum part = group_sums[row + 8 * r];
        part.move_top(best, scale_log2);
        rows[r].sum += part.sum;
      }
    }
  }

 private:
  template <class Scores>
  __device__ __forceinline__ void raise_tops(const Scores& r_s, float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best = rows[r].top;
#pragma unroll
      for (int i = 2 * r; i < r_s.size(); i += 4) best = fmaxf(best, fmaxf(r_s(i), r_s(i + 1)));
      rows[r].move_top(best, scale_log2);
    }
  }
  template <class Scores, class Exponential>
  static __device__ __forceinline__ void sum_rows(const Scores& r_s, const Exponential& exponential, float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 2) {
      const int r = i / 2 % 2;
      const float sum = exponential(r_s(i), r) + exponential(r_s(i + 1), r);
      sums[r] = i < 4 ? sum : sums[r] + sum;
    }
  }
};

}  // namespace dsa::coarse_attn_fwd
