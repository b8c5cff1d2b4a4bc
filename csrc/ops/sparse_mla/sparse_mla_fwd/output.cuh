// The end of an item: lse, the last factor of O, and the store of O from registers to global memory.
//
// O does not pass through shared memory, whose slots receive the keys of the next item during the store.
#pragma once

#include "sm90/math.cuh"
#include "storage.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/columns.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_fwd {

// Writes lse and returns the factor that turns O into the output, from a head's maximum (times scale), which may lag
// behind, and its sum.
template <Config kC>
__device__ __forceinline__ float finish_row(const KernelParams& p, const ItemOf<kC>& item, int head, float row_max,
                                            float row_sum) {
  const bool exists = head < item.heads_left(p);
  const bool empty = row_sum == 0.f;  // also where all scores are NaN and there is no maximum
  float denominator = row_sum;
  if (exists && p.attn_sink != nullptr && p.splits == 1) {
    const int h = item.head_of(p, head);
    denominator += exp2_fast(p.attn_sink[h * p.attn_sink_stride] * kLog2E - row_max);
  }
  if (exists) {
    float* g_lse = p.splits == 1 ? p.lse : p.partial_lse + item.split * p.rows;
    const float empty_lse = kC.is_paged ? p.maxima.empty_lse : -INFINITY;
    g_lse[item.first_row(p) + head] = empty ? empty_lse : kLn2 * log_of_sum(row_max, log2f(row_sum));
  }
  return empty ? 0.f : 1.f / denominator;
}

// Writes max_logits, from a head's largest score (times scale), and lse of rows without keys. After finish_row.
__device__ __forceinline__ void finish_max(const KernelParams& p, const Item& item, int head, float row_max,
                                           float row_sum, float largest) {
  if (head >= item.heads_left(p)) return;
  const int64_t row = item.first_row(p) + head;
  float* g_max = p.splits == 1 ? p.maxima.max_logits : p.maxima.partial_max + item.split * p.rows;
  // The largest score ignores NaN, the sum does not.
  g_max[row] = isnan(row_sum) && row_max < INFINITY ? row_sum : kLn2 * largest;
  if (row_sum == 0.f && p.splits == 1) p.lse[row] = p.maxima.empty_lse;
}

// The columns of O that one value warpgroup accumulates, from `kFirst` on. Called by all its threads.
template <int kFirst, int kDv, class Item, class Accumulator>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item, const Accumulator& r_o,
                                             int thread) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < item.heads_left(p);
    const int64_t out_row = item.first_row(p) + row + 8 * r;
    if (p.splits > 1) {
      float* g_out = p.partial_out + (item.split * p.rows + out_row) * kDv + kFirst + lane % 4 * 2;
#pragma unroll
      for (int i = 2 * r; i < cute::size(r_o); i += 4) {
        if (exists) *reinterpret_cast<float2*>(g_out + i / 4 * 8) = {r_o(i), r_o(i + 1)};
      }
    } else {
      Piece* g_pieces = reinterpret_cast<Piece*>(static_cast<Bf16*>(p.out) + out_row * kDv + kFirst) + lane % 4;
#pragma unroll
      for (int i = 2 * r; i < cute::size(r_o); i += 16) {
        Piece piece = {pack_bf16(r_o(i), r_o(i + 1)), pack_bf16(r_o(i + 4), r_o(i + 5)),
                       pack_bf16(r_o(i + 8), r_o(i + 9)), pack_bf16(r_o(i + 12), r_o(i + 13))};
        transpose_in_quads(piece, lane);
        if (exists) g_pieces[i / 16 * 4] = piece;
      }
    }
  }
}

// The same for O^T, [64 columns of each of the chunks from kFirstChunk on, kHeads heads].
template <int kFirstChunk, int kDv, int kHeads, class Item, class Accumulator>
__device__ __forceinline__ void store_output_transposed(const KernelParams& p, const Item& item, const Accumulator& r_o,
                                                        int thread) {
  constexpr int kFirst = kFirstChunk * kChunkColumns;
  const int64_t first_row = item.first_row(p);
  const int heads_left = item.heads_left(p);
  if (p.splits > 1) {
    float* g_out = p.partial_out + (item.split * p.rows + first_row) * kDv + kFirst;
    store_transposed_fp32<kHeads>(g_out, kDv, heads_left, r_o, thread);
  } else {
    Bf16* g_out = static_cast<Bf16*>(p.out) + first_row * kDv + kFirst;
    store_transposed_bf16<kHeads>(g_out, kDv, heads_left, r_o, thread);
  }
}

}  // namespace dsa::sparse_mla_fwd
