// Heads as columns of a warpgroup's 64-row accumulator: online softmax over its rows, and stores of the transpose.
#pragma once

#include <cstdint>

#include "accumulators.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::tiles {

// Stores 64 rows x kHeads columns of an accumulator as kHeads rows of one 64-column chunk.
template <int kHeads, class Accumulator>
__device__ __forceinline__ void store_transposed(uint32_t chunk, const Accumulator& r, int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int piece = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kHeads / 8; i += 2) {
    store_matrices_transposed(chunk + swizzled_offset((i + lane / 16) * 8 + lane % 8, piece),
                              pack_bf16(r(4 * i), r(4 * i + 1)), pack_bf16(r(4 * i + 2), r(4 * i + 3)),
                              pack_bf16(r(4 * i + 4), r(4 * i + 5)), pack_bf16(r(4 * i + 6), r(4 * i + 7)));
  }
}

// Raises the running maxima of all heads to those over the warpgroup. Called by all its threads; `of_warps` is shared
// memory for one value per head and warp.
template <int kBarrier, int kHeads, int kColumns>
__device__ __forceinline__ void raise_maxima(float (&of_warps)[kWarpsPerWarpgroup][kHeads], float (&top)[kColumns],
                                             float (&column_max)[kColumns], float (&column_sum)[kColumns],
                                             int (&exponents)[kColumns], int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const auto head = [&](int c) { return column_in_row(c, lane); };
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) {
      top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], lanes));
    }
    if (lane < 4) of_warps[warp][head(c)] = top[c];
  }
  sync_warpgroup<kBarrier>();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float all = of_warps[0][head(c)];
#pragma unroll
    for (int w = 1; w < kWarpsPerWarpgroup; ++w) all = fmaxf(all, of_warps[w][head(c)]);
    all = raised_max(column_max[c], all);
    exponents[c] = rescale_bits(column_max[c], all);
    column_sum[c] *= power_of_two(exponents[c]);
    column_max[c] = all;
  }
  sync_warpgroup<kBarrier>();
}

// Sums over the warpgroup's rows, valid in threads 0 to 3. Called by all its threads.
template <int kBarrier, int kHeads, int kColumns>
__device__ __forceinline__ void sum_columns(float (&of_warps)[kWarpsPerWarpgroup][kHeads],
                                            float (&column_sum)[kColumns], int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) {
      column_sum[c] += __shfl_xor_sync(~0u, column_sum[c], lanes);
    }
    if (lane < 4) of_warps[warp][column_in_row(c, lane)] = column_sum[c];
  }
  sync_warpgroup<kBarrier>();
  if (thread >= 4) return;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    column_sum[c] = 0.f;
#pragma unroll
    for (int w = 0; w < kWarpsPerWarpgroup; ++w) column_sum[c] += of_warps[w][column_in_row(c, lane)];
  }
}

// O^T, chunks of [64 columns, kHeads heads], in fp32 to the rows of heads [0, heads_left), which are `stride`
// elements apart. g_first: of the first chunk.
template <int kHeads, class Accumulator>
__device__ __forceinline__ void store_transposed_fp32(float* g_first, int stride, int heads_left,
                                                      const Accumulator& r_o, int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
#pragma unroll
  for (int i = 0; i < r_o.size(); ++i) {
    const int head = column_of_value(i % (kHeads / 2), lane), chunk = i / (kHeads / 2);
    const int column = chunk * kChunkColumns + warp * 16 + lane / 4 + i / 2 % 2 * 8;
    if (head < heads_left) g_first[int64_t{head} * stride + column] = r_o(i);
  }
}

// The same in bf16, of four chunks.
template <int kHeads, class Accumulator>
__device__ __forceinline__ void store_transposed_bf16(Bf16* g_first, int stride, int heads_left, const Accumulator& r_o,
                                                      int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  // A transposed 8x8 matrix has heads as rows. Two matrices of a warp are 32 bytes of an output row; of each head,
  // two lanes of a quad store those of one chunk, the other two those of the chunk after the next.
#pragma unroll
  for (int i = 0; i < kHeads / 2; i += 4) {
    const int head = i / 4 * 8 + lane / 4, column = lane / 2 % 2 * 2 * kChunkColumns + warp * 16;
    Piece* g_pieces = reinterpret_cast<Piece*>(g_first + int64_t{head} * stride + column) + lane % 2;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      Piece piece;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = i + m % 2 * 2, of = chunk + m / 2 * 2;
        piece.words[m] = transpose_matrix(pack_bf16(r_o(at, of, 0), r_o(at + 1, of, 0)));
      }
      transpose_in_quads(piece, lane);
      if (head < heads_left) g_pieces[chunk * kChunkColumns / kPieceColumns] = piece;
    }
  }
}

}  // namespace dsa::tiles
