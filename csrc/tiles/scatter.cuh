// Writes a warp's fp32 wgmma accumulators, 16 rows, to rows in global memory: added to fp32 sums, or stored in bf16.
//
// A thread holds four values of its row in each 16 columns: columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, t = lane % 4.
// Within each 32 columns, rows are stored in the permuted column order that is fastest to write; the reader undoes it.
#pragma once

#include <cstdint>

#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"

namespace dsa::tiles {

using namespace dsa::sm90;

inline constexpr int kScatterColumns = 32;

// The position, among its 32 columns, at which add_rows keeps the sum of column `column` (0..31).
__device__ __forceinline__ constexpr int summed_place(int column) {
  const int quad = column / 16, half = column % 16 / 8, t = column % 8 / 2, odd = column % 2;
  return quad * 16 + t * 4 + half * 2 + odd;
}

// The column, among its 32, of the value that store_rows keeps at position `place` (0..31).
__device__ __forceinline__ constexpr int stored_column(int place) {
  const int t = place / 8, eight = place % 8 / 2, odd = place % 2;
  return eight * 8 + t * 2 + odd;
}

// The ids of a warp's 16 rows, in registers; called by all lanes together. The shuffle completes the load before a
// later arrival lets others overwrite the ids.
struct RowIds {
  int id;

  __device__ __forceinline__ RowIds() : id(-1) {}
  __device__ __forceinline__ RowIds(const int* warp_ids, int lane) : id(__shfl_sync(~0u, warp_ids[lane % 16], lane)) {}
  __device__ __forceinline__ int operator[](int row) const { return __shfl_sync(~0u, id, row); }
};

// Where a lane adds to one of its rows.
struct SumRow {
  float* g_columns;
  int id;  // of the row's key, -1 for none
};

// The i-th of a lane's four rows, of the warp's 16. The row of key `id` begins id * row_bytes bytes after g_first.
// Where there is no key, the address has no meaning and is not used.
template <class Ids>
__device__ __forceinline__ SumRow sum_row(float* g_first, uint32_t row_bytes, const Ids& warp_ids, int i, int lane) {
  const int id = warp_ids[lane / 8 * 2 + i % 2 + i / 2 * 8];
  char* const g_columns = reinterpret_cast<char*>(g_first + lane % 8 * 4);
  return {reinterpret_cast<float*>(g_columns + uint64_t{static_cast<unsigned>(id)} * row_bytes), id};
}

// Adds to row_of(0..3), kTogether pieces of 32 columns of a row before those of the next row; all pieces of a row
// together are best where rows are not in L2.
//
// Two quads of lanes share their rows, so that together they add to whole cache lines: L2 accepts those at a higher
// rate than partial lines. So of each two groups of 16 columns the lower quad gets the first and the higher quad the
// second, of both quads' rows. The results are new variables: in place of the accumulators, ptxas would copy them to
// the four consecutive registers that an addition takes.
template <int kTogether, class RowOf, class Accumulator>
__device__ __forceinline__ void add_rows(const RowOf& row_of, const Accumulator& r_sum, int lane) {
  constexpr int kPieces = decltype(r_sum.size())::value / 16;
  static_assert(kTogether > 0 && kPieces % kTogether == 0);
  constexpr int kInQuad[4] = {0, 1, 4, 5};  // those of a row among a group's eight accumulators
  const bool higher = lane & 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const SumRow rows[2] = {row_of(2 * half), row_of(2 * half + 1)};  // of the lower and the higher quad
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += kTogether) {
      float sums[2][kTogether][4];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int at = 16 * (piece + i) + 2 * half + kInQuad[k];
          const float received = __shfl_xor_sync(~0u, higher ? r_sum(at) : r_sum(at + 8), 4);
          sums[0][i][k] = higher ? received : r_sum(at);
          sums[1][i][k] = higher ? r_sum(at + 8) : received;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          add_to_global(rows[r].g_columns + (piece + i) * kScatterColumns, rows[r].id, sums[r][i][0], sums[r][i][1],
                        sums[r][i][2], sums[r][i][3]);
        }
      }
    }
  }
}

// Stores to consecutive rows, rounded to bf16, from column g_first on; skips rows whose id is -1.
template <class Row, class Ids, class Accumulator>
__device__ __forceinline__ void store_rows(Row* g_first, int stride, const Ids& warp_ids, const Accumulator& r_row,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    if (warp_ids[row] < 0) continue;
    uint4* g_pieces = reinterpret_cast<uint4*>(g_first + row * stride) + lane % 4;
#pragma unroll
    for (int i = 2 * r; i < r_row.size(); i += 16) {
      g_pieces[i / 16 * 4] = {pack_bf16(r_row(i), r_row(i + 1)), pack_bf16(r_row(i + 4), r_row(i + 5)),
                              pack_bf16(r_row(i + 8), r_row(i + 9)), pack_bf16(r_row(i + 12), r_row(i + 13))};
    }
  }
}

// The same for 16 columns, a half of the 32 from g_first on.
template <class Row, class Ids, class Accumulator>
__device__ __forceinline__ void store_half_rows(Row* g_first, int half, int stride, const Ids& warp_ids,
                                                const Accumulator& r_row, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r, i = 2 * r;
    if (warp_ids[row] < 0) continue;
    reinterpret_cast<uint2*>(g_first + row * stride)[lane % 4 * 2 + half] = {pack_bf16(r_row(i), r_row(i + 1)),
                                                                             pack_bf16(r_row(i + 4), r_row(i + 5))};
  }
}

}  // namespace dsa::tiles
