// The weighted sum over heads of a wgmma accumulator: 64 keys x rows of Q. All kernels that score keys share it, so
// their logits are bitwise equal.
#pragma once

#include "sm90/math.cuh"

namespace dsa::indexer_logits {

// e4m3, with scales for the keys.
template <class Element>
inline constexpr bool kIsFp8 = sizeof(Element) == 1;

// Every other head takes x + |x| and half of its weight, which is exact: addition and maximum run in different
// pipelines. Not with bf16, where the sum might overflow.
template <class Element>
constexpr bool is_doubled(int i) {
  return kIsFp8<Element> && i % 2 == 0;
}

// relu(x), or twice that; NaN stays NaN.
__device__ __forceinline__ float rectified(float x, bool doubled) { return doubled ? x + fabsf(x) : sm90::relu(x); }

// Weighted sums over the heads of each query, of the scores of a pass over kRows rows of Q. Of a lane's two rows of
// keys the upper lanes take the second one, the others the first, each with what the lane across has of it.
template <class Element, int kHeads, int kRows, class Scores>
__device__ __forceinline__ void sum_heads(const Scores& r_s, const float (&weights)[kRows / 4], int upper,
                                          float (&key_sums)[kRows / kHeads]) {
  constexpr int kQueries = kRows / kHeads;
  float sums[2][kQueries] = {};
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = sums[half][i / 2 * 8 / kHeads];
      sum = fmaf(rectified(r_s(i / 2 * 4 + half * 2 + i % 2), is_doubled<Element>(i)), weights[i], sum);
    }
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    key_sums[i] = (upper ? sums[1][i] : sums[0][i]) + __shfl_xor_sync(~0u, upper ? sums[0][i] : sums[1][i], 2);
  }
}

}  // namespace dsa::indexer_logits
