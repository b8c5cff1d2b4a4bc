// wgmma accumulators in registers: which element of a 64-row tile each value is, and stores of whole fragments.
//
// Value i of a lane is in row lane / 4 + i / 2 % 2 * 8 of its warp's 16 rows; two lanes whose difference is a multiple
// of 4 have the same columns.
#pragma once

#include <cstdint>

#include "sm90/matrix_copy.cuh"

namespace dsa::tiles {

using namespace dsa::sm90;

// The column of value i of a lane.
__device__ __forceinline__ constexpr int column_of_value(int i, int lane) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// The column of the c-th of a lane's values in a row.
__device__ __forceinline__ constexpr int column_in_row(int c, int lane) { return c / 2 * 8 + lane % 4 * 2 + c % 2; }

// Quads of lanes transpose 4 x 4 words: lane t of a quad gets word t of each of its lanes, in their order. Of an
// accumulator rounded to bf16, whose lanes hold a word of each 16-byte piece of a row, each lane so gets whole pieces.
__device__ __forceinline__ void transpose_in_quads(Piece& piece, int lane) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    const bool higher = lane & lanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & lanes) continue;
      uint32_t &low = piece.words[i], &high = piece.words[i + lanes];
      const uint32_t swapped = __shfl_xor_sync(~0u, higher ? low : high, lanes);
      low = higher ? swapped : low;
      high = higher ? high : swapped;
    }
  }
}

// Stores a warpgroup's 64-row fp32 accumulator fragment, rounded to bf16, as 64-column chunks from `chunk` on. This
// thread addresses `row`, where row thread / 32 * 16 + thread % 16 of the fragment goes, and 16-byte piece
// thread / 16 % 2 of each two.
template <int kColumns, class Accumulator>
__device__ __forceinline__ void store_accumulators(uint32_t chunk, const Accumulator& r, int row, int piece) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    store_matrices(chunk + i / 4 * 64 * kSwizzleRowBytes + swizzled_offset(row, i % 4 * 2 + piece),
                   pack_bf16(r(8 * i), r(8 * i + 1)), pack_bf16(r(8 * i + 2), r(8 * i + 3)),
                   pack_bf16(r(8 * i + 4), r(8 * i + 5)), pack_bf16(r(8 * i + 6), r(8 * i + 7)));
  }
}

// The same, rows in order.
template <int kColumns, class Accumulator>
__device__ __forceinline__ void store_accumulators(uint32_t chunk, const Accumulator& r, int thread) {
  store_accumulators<kColumns>(chunk, r, thread / 32 * 16 + thread % 16, thread / 16 % 2);
}

// Stores the lane's row lane / 4 + 8 r of an accumulator, rounded to bf16, to a row in global memory if it exists.
// Called by whole warps.
template <int kColumns, class Accumulator>
__device__ __forceinline__ void store_row(Piece* g_row, bool exists, const Accumulator& r_o, int r, int lane) {
#pragma unroll
  for (int i = 2 * r; i < kColumns / 2; i += 16) {
    Piece piece = {pack_bf16(r_o(i), r_o(i + 1)), pack_bf16(r_o(i + 4), r_o(i + 5)), pack_bf16(r_o(i + 8), r_o(i + 9)),
                   pack_bf16(r_o(i + 12), r_o(i + 13))};
    transpose_in_quads(piece, lane);
    if (exists) g_row[i / 16 * 4 + lane % 4] = piece;
  }
}

// Stores the same fragment unrounded to global memory, in rows that are `stride` elements apart.
template <class Accumulator>
__device__ __forceinline__ void store_accumulators_to_global(float* g_first, int stride, const Accumulator& r,
                                                             int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < r.size(); i += 2) {
    float* g_pair = g_first + (row + i / 2 % 2 * 8) * stride + i / 4 * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(g_pair) = {r(i), r(i + 1)};
  }
}

}  // namespace dsa::tiles
