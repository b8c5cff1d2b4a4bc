// Online softmax of 64 queries x 128 keys, of which bits say which count.
#pragma once

#include <cfloat>

#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/online_softmax.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mha_fwd {

using namespace dsa::tiles;

// The bits of a lane's two rows of a tile, shifted so that its columns are at the same places in every lane.
struct SelectedKeys {
  uint32_t words[2][4];

  // s_bits: those of the warp's first row.
  __device__ __forceinline__ SelectedKeys(const uint4* s_bits, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 bits = s_bits[lane / 4 + 8 * r];
      const int shift = lane % 4 * 2;
      words[r][0] = bits.x >> shift, words[r][1] = bits.y >> shift;
      words[r][2] = bits.z >> shift, words[r][3] = bits.w >> shift;
    }
  }

  // Whether value i of the lane's scores counts.
  __device__ __forceinline__ bool has(int i) const {
    const int column = column_of_value(i, 0);
    return words[i / 2 % 2][column / 32] & 1u << column % 32;
  }

  // Scores that do not count become -inf, whatever they are.
  template <class Scores>
  __device__ __forceinline__ void apply(Scores& r_s) const {
    uint32_t common = words[0][0] & words[1][0];
#pragma unroll
    for (int w = 1; w < 4; ++w) common &= words[0][w] & words[1][w];
    constexpr uint32_t kColumns = 0x03030303;  // of a lane, in each word
    if (__all_sync(~0u, (common & kColumns) == kColumns)) return;
#pragma unroll
    for (int i = 0; i < r_s.size(); ++i) r_s(i) = has(i) ? r_s(i) : -INFINITY;
  }
};

// Softmax state of a lane's two rows. Base-2 exponentials of scores are relative to a running maximum, which lags
// behind by at most kRescaleStep (in base-2 units), so that O is rarely rescaled. A large maximum is subtracted from
// the scores before they are scaled.
struct Softmax {
  static constexpr float kNone = -FLT_MAX;  // no score yet, or only -inf

  float scale_log2;
  float top[2] = {kNone, kNone}, limit[2] = {kNone, kNone};  // beyond `limit`, a score moves `top`
  float base[2] = {};                                        // minus the scaled `top`; 0 if any of the warp is large
  float sum[2] = {};                                         // of the lane's columns
  bool is_large = false;                                     // uniform in a warp

  __device__ __forceinline__ explicit Softmax(float scale_log2) : scale_log2(scale_log2) {}

  // Moves `top` where scores are beyond `limit`. Returns whether any of the warp has moved: then earlier outputs are to
  // be multiplied by `factors`.
  template <class Scores>
  __device__ __forceinline__ bool raise(const Scores& r_s, float (&factors)[2]) {
    float best[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = r_s(2 * r), odd = r_s(2 * r + 1);
#pragma unroll
      for (int i = 2 * r + 4; i < r_s.size(); i += 4) even = fmaxf(even, r_s(i)), odd = fmaxf(odd, r_s(i + 1));
      best[r] = fmaxf(even, odd);
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
    }
    const bool moves = __any_sync(~0u, best[0] > limit[0] || best[1] > limit[1]);
    if (moves) move(best, factors);
    return moves;
  }

  __device__ __forceinline__ void move(const float (&best)[2], float (&factors)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = best[r] > limit[r] ? best[r] : top[r];
      factors[r] = next == top[r] ? 1.f : exp2_fast((top[r] - next) * scale_log2);
      sum[r] *= factors[r];
      top[r] = next;
      if (next == kNone) continue;
      limit[r] = next + kRescaleStep / scale_log2;
      base[r] = -next * scale_log2;
    }
    const float large[2] = {top[0] == kNone ? 0.f : top[0] * scale_log2, top[1] == kNone ? 0.f : top[1] * scale_log2};
    is_large = __any_sync(~0u, !(fmaxf(fabsf(large[0]), fabsf(large[1])) <= kLargeScore));
    if (is_large) base[0] = base[1] = 0.f;
  }

  // Scores become probabilities, which are added up.
  template <class Scores>
  __device__ __forceinline__ void exponentiate(Scores& r_s) {
    if (is_large) {
#pragma unroll
      for (int i = 0; i < r_s.size(); ++i) r_s(i) -= top[i / 2 % 2];
    }
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < r_s.size(); ++i) {
      r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, base[i / 2 % 2]));
      part[i / 2 % 2][i % 2] += r_s(i);
    }
    sum[0] += part[0][0] + part[0][1], sum[1] += part[1][0] + part[1][1];
  }

  // After the last tile: sums over all columns.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
  __device__ __forceinline__ float share(int r) const { return sum[r] == 0.f ? 0.f : 1.f / sum[r]; }
  __device__ __forceinline__ float lse(int r) const {
    return sum[r] == 0.f ? -INFINITY : log_of_sum(top[r] * scale_log2, log2_fast(sum[r])) * kLn2;
  }
};

}  // namespace dsa::sparse_mha_fwd
