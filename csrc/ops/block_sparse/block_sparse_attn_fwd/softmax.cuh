// Online softmax: from scores to probabilities, and the row sums.
#pragma once

#include <limits>

#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/softmax.cuh"

namespace dsa::block_sparse_attn_fwd {

using namespace dsa::tiles;

// Softmax state of a lane's two rows. Base-2 exponentials of scores are relative to a running maximum: that of the
// first block, which moves only when a sum exceeds 2^40. Until then fp32 and bf16 are as accurate as with the true
// maximum, except that probabilities below 2^-86 may become 0 when it moves. A large maximum is subtracted from the
// scores before they are scaled, and updated at every block.
struct Softmax {
  static constexpr float kNone = std::numeric_limits<float>::lowest();  // no score yet, or only -inf

  float top[2] = {kNone, kNone}, sum[2] = {};  // sum: of the lane's columns
  float base[2];                               // minus the scaled maximum; 0 if that has been subtracted already
  bool is_first = true;
  bool moves = true;  // whether the maximum is updated before each block; uniform in a warp

  // Moves the maximum up to that of these scores, and rescales the output.
  template <class Scores, class Out>
  __device__ __forceinline__ void move_top(Scores& r_s, Out& r_out, float scale_log2) {
    float best[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < r_s.size(); ++i) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], r_s(i));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
      base[r] = __fmul_rn(-best[r], scale_log2);
      const float factor = top[r] == best[r] ? 1.f : exp2_fast(__fmul_rn(top[r], scale_log2) + base[r]);
      top[r] = best[r];
      if (is_first) continue;
      sum[r] *= factor;
#pragma unroll
      for (int i = 2 * r; i < r_out.size(); i += 4) r_out(i) *= factor, r_out(i + 1) *= factor;
    }
    is_first = false;
    moves = __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kLargeScore);
    if (!moves) return;
    base[0] = base[1] = 0.f;
#pragma unroll
    for (int i = 0; i < r_s.size(); ++i) r_s(i) -= top[i / 2 % 2];
  }

  // Converts scores to probabilities, as operands, and adds them up. Returns false, and adds nothing, if the maximum
  // has to move first, unless it just has.
  template <class Scores>
  __device__ __forceinline__ bool add(const Scores& r_s, uint32_t* pairs, float scale_log2, bool has_moved,
                                      int barrier) {
    constexpr float kLimit = 0x1p40f;
    float part[2] = {};
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 2) {
      const int r = i / 2 % 2;
      const float low = exp2_fast(fmaf(r_s(i), scale_log2, base[r]));
      const float high = exp2_fast(fmaf(r_s(i + 1), scale_log2, base[r]));
      part[r] += low + high;
      pairs[i / 2] = pack_bf16(low, high);
    }
    if (any_of_warpgroup(barrier, part[0] > kLimit || part[1] > kLimit) && !has_moved) return false;
    sum[0] += part[0], sum[1] += part[1];
    return true;
  }

  // After the last block: sums over all columns; `top` becomes a base-2 logarithm.
  __device__ __forceinline__ void finish(float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      top[r] = __fmul_rn(top[r], scale_log2);
    }
  }
  __device__ __forceinline__ float share(int r) const { return sum[r] == 0.f ? 0.f : 1.f / sum[r]; }
  __device__ __forceinline__ float lse_log2(int r) const {
    return sum[r] == 0.f ? -INFINITY : log_of_sum(top[r], log2_fast(sum[r]));
  }
};

}  // namespace dsa::block_sparse_attn_fwd
