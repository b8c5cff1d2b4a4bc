// Scores to probabilities, and the sums of rows.
#pragma once

#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::block_sparse_attn_fwd {

using namespace dsa::sm90;

// Two rows of a lane. Scores, in units of log 2, are taken relative to an offset, which is the maximum of the first
// block that is seen, and follows only when a sum grows beyond 2^40. Until then fp32 and bf16 bear it as well as
// if it were the maximum.
struct Softmax {
  float offset[2] = {}, sum[2] = {};  // `sum` is of the lane's columns
  bool is_first = true;

  // The output follows.
  template <class Scores, class Out>
  __device__ __forceinline__ void move_offset(const Scores& r_s, Out& r_out, float scale_log2) {
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < r_s.size(); ++i) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], r_s(i));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2)) * scale_log2;
      const float next = best[r] == -INFINITY ? offset[r] : is_first ? best[r] : fmaxf(offset[r], best[r]);
      const float factor = exp2_fast(offset[r] - next);
      offset[r] = next;
      if (is_first) continue;
      sum[r] *= factor;
#pragma unroll
      for (int i = 2 * r; i < r_out.size(); i += 4) r_out(i) *= factor, r_out(i + 1) *= factor;
    }
    is_first = false;
  }

  // Scores to probabilities, as operands. False where they grow too large; then nothing is added.
  template <class Scores>
  __device__ __forceinline__ bool add(const Scores& r_s, uint32_t* pairs, float scale_log2, int barrier) {
    constexpr float kLimit = 0x1p40f;
    float part[2] = {};
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 2) {
      const int r = i / 2 % 2;
      const float low = exp2_fast(fmaf(r_s(i), scale_log2, -offset[r]));
      const float high = exp2_fast(fmaf(r_s(i + 1), scale_log2, -offset[r]));
      part[r] += low + high;
      pairs[i / 2] = pack_bf16(low, high);
    }
    if (any_of_warpgroup(barrier, part[0] > kLimit || part[1] > kLimit)) return false;
    sum[0] += part[0], sum[1] += part[1];
    return true;
  }

  // Over all columns, once all are through.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
  __device__ __forceinline__ float share(int r) const { return sum[r] == 0.f ? 0.f : 1.f / sum[r]; }
  __device__ __forceinline__ float lse_log2(int r) const {
    return sum[r] == 0.f ? -INFINITY : offset[r] + log2_fast(sum[r]);
  }
};

}  // namespace dsa::block_sparse_attn_fwd
