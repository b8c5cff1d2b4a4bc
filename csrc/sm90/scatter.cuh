// Adding fp32 accumulators of wgmma to rows of global memory, 128 bytes of a row at a time: L2 takes whole lines at
// twice the rate of halves.
//
// A thread holds four values of its row in each 16 columns: columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, t = lane % 4.
// The sums in global memory keep these side by side: value e of thread t stands in place 4 t + e of its 16 columns.
// Whoever reads the sums puts the columns back in order.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

inline constexpr int kScatterColumns = 16;

// The place, among its 16 columns, of the sum of column `column` (0..15).
__device__ __forceinline__ constexpr int scattered_place(int column) {
  return column % 8 / 2 * 4 + column / 8 * 2 + column % 2;
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

// Lets each addition cover 32 columns of one row: two neighbouring quads of lanes, which hold two neighbouring rows,
// swap halves of every 32 columns. Then the first eight of 16 accumulators belong to the even quad's row, the others to
// the odd one's, and the odd quad has the second 16 columns of both.
template <class Accumulator>
__device__ __forceinline__ void swap_between_quads(Accumulator& r_sum, int lane) {
  const bool odd = lane & 4;
#pragma unroll
  for (int i = 0; i < r_sum.size(); ++i) {
    if (i & 8) continue;
    const float swapped = __shfl_xor_sync(~0u, odd ? r_sum(i) : r_sum(i + 8), 4);
    r_sum(i) = odd ? swapped : r_sum(i);
    r_sum(i + 8) = odd ? r_sum(i + 8) : swapped;
  }
}

// Two neighbouring rows, held by two neighbouring quads of lanes.
struct RowPair {
  float* g_rows[2];  // this lane's place in their first 32 columns
  bool exists[2];

  // Row `id` begins at g_first + id * stride; -1 is none.
  __device__ __forceinline__ RowPair(float* g_first, uint32_t stride, const int* ids, int lane) {
    g_first += (lane & 4 ? kScatterColumns : 0) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exists[i] = ids[i] >= 0;
      g_rows[i] = g_first + static_cast<int64_t>(ids[i]) * stride;
    }
  }

  // Adds the rows' columns from `column` on, the accumulators from `first` on after swap_between_quads.
  template <class Accumulator>
  __device__ __forceinline__ void add(int column, const Accumulator& r_sum, int first) const {
#pragma unroll
    for (int i = first; i < r_sum.size(); i += 8) {
      add_to_global(g_rows[i / 8 % 2] + column + i / 16 * 32, exists[i / 8 % 2], r_sum(i), r_sum(i + 1), r_sum(i + 4),
                    r_sum(i + 5));
    }
  }
};

}  // namespace dsa::sm90
