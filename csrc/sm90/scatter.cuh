// Adding fp32 accumulators of wgmma to rows of sums in global memory.
//
// Sums are fp32; or 64-bit integers, where the result must not depend on the order of the additions. A thread holds
// four values of its row in each 16 columns: columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, t = lane % 4. Neighbouring
// quads of lanes swap halves of 32 columns, so that eight lanes together add to one row: L2 takes whole lines at a
// higher rate than parts of them. The sums keep their columns in the order in which that happens; who reads them puts
// them back.
#pragma once

#include <cmath>
#include <cstdint>

namespace dsa::sm90 {

using FixedPoint = unsigned long long;  // two's complement

inline constexpr int kScatterColumns = 32;

// The place, among its 32 columns, of the sum of column `column` (0..31).
template <class Sum>
__device__ __forceinline__ constexpr int scattered_place(int column) {
  const int lane = column / 16 * 4 + column % 8 / 2, value = column % 16 / 8 * 2 + column % 2;
  return sizeof(Sum) == sizeof(float) ? lane * 4 + value : value * 8 + lane;
}

// red.global.add.v4.f32, where `wanted`
__device__ __forceinline__ void add_to_global(float* g_sum, bool wanted, float a, float b, float c, float d) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %1, 0;\n"
      "@wanted red.global.add.v4.f32 [%0], {%2, %3, %4, %5};\n"
      "}\n" ::"l"(g_sum),
      "r"(static_cast<int>(wanted)), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// red.global.add.u64, where `wanted`
__device__ __forceinline__ void add_to_global(FixedPoint* g_sum, bool wanted, FixedPoint value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %1, 0;\n"
      "@wanted red.global.add.u64 [%0], %2;\n"
      "}\n" ::"l"(g_sum),
      "r"(static_cast<int>(wanted)), "l"(value)
      : "memory");
}

// The largest power of two that brings values up to `bound` below `limit`.
__device__ __forceinline__ float fixed_point_scale(float bound, float limit) {
  return bound > 0.f ? exp2f(fminf(fmaxf(floorf(log2f(limit) - log2f(bound)), -100.f), 100.f)) : 1.f;
}

// The rows of one warp's accumulators that two neighbouring quads of lanes hold between them.
struct RowPairs {
  int ids[2][2];  // of rows 0..7 and 8..15, -1 for none

  __device__ __forceinline__ RowPairs(const int* warp_ids, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ids[i / 2][i % 2] = warp_ids[lane / 8 * 2 + i % 2 + i / 2 * 8];
  }

  // Adds 16 rows to the columns from g_first on; row `id` begins id * stride further.
  template <class Sum, class Accumulator>
  __device__ __forceinline__ void add(Sum* g_first, uint32_t stride, Accumulator& r_sum, int lane) const {
    const bool odd = lane & 4;
#pragma unroll
    for (int i = 0; i < r_sum.size(); ++i) {  // even quads keep their first 16 columns, odd ones their second
      if (i & 8) continue;
      const float swapped = __shfl_xor_sync(~0u, odd ? r_sum(i) : r_sum(i + 8), 4);
      r_sum(i) = odd ? swapped : r_sum(i);
      r_sum(i + 8) = odd ? r_sum(i + 8) : swapped;
    }
    constexpr bool kFixedPoint = sizeof(Sum) != sizeof(float);
    g_first += lane % 8 * (kFixedPoint ? 1 : 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 2 * r; i < r_sum.size(); i += 8) {
        const int id = ids[r][i / 8 % 2];
        Sum* g_sum = g_first + static_cast<int64_t>(id) * stride + i / 16 * kScatterColumns;
        const float values[4] = {r_sum(i), r_sum(i + 1), r_sum(i + 4), r_sum(i + 5)};
        if constexpr (kFixedPoint) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            add_to_global(g_sum + 8 * k, id >= 0, static_cast<FixedPoint>(__float2ll_rn(values[k])));
          }
        } else {
          add_to_global(g_sum, id >= 0, values[0], values[1], values[2], values[3]);
        }
      }
    }
  }
};

}  // namespace dsa::sm90
