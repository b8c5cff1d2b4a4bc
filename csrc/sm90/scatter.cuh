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
  const int quad = column / 16, half = column % 16 / 8, t = column % 8 / 2, odd = column % 2;
  return sizeof(Sum) == sizeof(float) ? quad * 16 + t * 4 + half * 2 + odd : odd * 16 + half * 8 + quad * 4 + t;
}

// cp.async.bulk.prefetch.L2: `bytes` is a multiple of 16
__device__ __forceinline__ void prefetch_to_l2(const void* g_data, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g_data), "r"(bytes) : "memory");
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

// Lanes whose numbers differ in kLanes swap: of the accumulators whose indices differ in kBit, the first stay with the
// lower lane and come to it, the second with the higher one.
template <int kBit, int kLanes, class Accumulator>
__device__ __forceinline__ void swap_halves(Accumulator& r_sum, int lane) {
  const bool higher = lane & kLanes;
#pragma unroll
  for (int i = 0; i < r_sum.size(); ++i) {
    if (i & kBit) continue;
    const float swapped = __shfl_xor_sync(~0u, higher ? r_sum(i) : r_sum(i + kBit), kLanes);
    r_sum(i) = higher ? swapped : r_sum(i);
    r_sum(i + kBit) = higher ? r_sum(i + kBit) : swapped;
  }
}

// The rows of one warp's accumulators that its neighbouring quads of lanes hold between them: two, or four with
// fixed-point sums.
template <class Sum>
struct SumRows {
  static constexpr bool kFixedPoint = sizeof(Sum) != sizeof(float);
  static constexpr int kRows = kFixedPoint ? 4 : 2, kLanes = 4 * kRows;
  const int* warp_ids;  // -1 for none

  // Adds 16 rows to the columns from g_first on; row `id` begins id * stride further.
  template <class Accumulator>
  __device__ __forceinline__ void add(Sum* g_first, uint32_t stride, Accumulator& r_sum, int lane) const {
    swap_halves<8, 4>(r_sum, lane);
    if constexpr (kFixedPoint) swap_halves<4, 8>(r_sum, lane);
    g_first += lane % kLanes * (kFixedPoint ? 1 : 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int id = warp_ids[lane / kLanes * kRows + row + 8 * r];
        Sum* g_row = g_first + static_cast<int64_t>(id) * stride;
#pragma unroll
        for (int i = 2 * r + row % 2 * 8 + row / 2 * 4; i < r_sum.size(); i += 16) {
          Sum* g_sum = g_row + i / 16 * kScatterColumns;
          if constexpr (kFixedPoint) {
            add_to_global(g_sum, id >= 0, static_cast<FixedPoint>(__float2ll_rn(r_sum(i))));
            add_to_global(g_sum + 16, id >= 0, static_cast<FixedPoint>(__float2ll_rn(r_sum(i + 1))));
          } else {
            add_to_global(g_sum, id >= 0, r_sum(i), r_sum(i + 1), r_sum(i + 4), r_sum(i + 5));
          }
        }
      }
    }
  }
};

}  // namespace dsa::sm90
