// The row warpgroups: w D, dq and dw. kernel.cuh says who does what.
#pragma once

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"

namespace dsa::indexer_bwd {

// D = g [S > 0] as an operand, and w D, transposed by its readers, to shared memory.
template <int kHeads, class Scores>
__device__ __forceinline__ void compute_derivatives(const Scores& r_s, const uint16_t* s_gradients,
                                                    const float (&weights)[2], int row, int lane,
                                                    uint32_t (&pairs)[kTileKeys / 16][4], uint32_t s_derivatives,
                                                    int matrix_row) {
  const int matrix_piece = lane / 16;
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i) {
    uint32_t weighted[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // of four 8 x 8 matrices: rows first, then keys
      const int key = i * 16 + m / 2 * 8 + lane % 4 * 2, query = (row + m % 2 * 8) / kHeads;
      const uint32_t gradients = *reinterpret_cast<const uint32_t*>(s_gradients + query * kTileKeys + key);
      // A NaN score counts as positive, as in the reference.
      const uint32_t low = r_s(8 * i + 2 * m) <= 0.f ? 0u : gradients << 16;
      const uint32_t high = r_s(8 * i + 2 * m + 1) <= 0.f ? 0u : gradients & 0xffff0000u;
      pairs[i][m] = low >> 16 | high;
      weighted[m] = pack_bf16(__uint_as_float(low) * weights[m % 2], __uint_as_float(high) * weights[m % 2]);
    }
    store_matrices(s_derivatives + swizzled_offset(matrix_row, i * 2 + matrix_piece), weighted[0], weighted[1],
                   weighted[2], weighted[3]);
  }
}

// dq = w D K to shared memory; its dot products with Q are added to dweights.
template <int kColumns, class Sums>
__device__ __forceinline__ void store_dq(const Sums& r_sum, const uint32_t (&q_pairs)[kColumns / 16][4],
                                         const float (&weights)[2], float (&dweights)[2], uint32_t s_dq, int matrix_row,
                                         int matrix_piece) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    uint32_t dq[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float low = r_sum(8 * i + 2 * m), high = r_sum(8 * i + 2 * m + 1);
      dweights[m % 2] = fmaf(low, __uint_as_float(q_pairs[i][m] << 16), dweights[m % 2]);
      dweights[m % 2] = fmaf(high, __uint_as_float(q_pairs[i][m] & 0xffff0000u), dweights[m % 2]);
      dq[m] = pack_bf16(low * weights[m % 2], high * weights[m % 2]);
    }
    store_matrices(s_dq + i / 4 * kChunkBytes + swizzled_offset(matrix_row, i % 4 * 2 + matrix_piece), dq[0], dq[1],
                   dq[2], dq[3]);
  }
}

// Computes w D, dq and dw of 64 rows. Run by row warpgroup `warpgroup`.
template <int kColumns, int kHeads>
__device__ __forceinline__ void compute_rows(SharedStorage<kColumns, kHeads>& shared, const Params& p,
                                             const CUtensorMap& dq_map, int warpgroup, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int first_row = warpgroup * kWarpgroupRows, matrix_row = warp * 16 + lane % 16, matrix_piece = lane / 16;
  const int row = first_row + warp * 16 + lane / 4;  // and row + 8

  ScoreMmaFromRegisters score_mma;
  RowsMma<kColumns> rows_mma;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kColumns / 16>>{});
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_d = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kTileKeys / 16>>{});
  Tensor r_sum = partition_fragment_C(rows_mma, Shape<_64, Int<kColumns>>{});
  auto& q_pairs = *reinterpret_cast<uint32_t (*)[kColumns / 16][4]>(r_q.data());
  auto& pairs = *reinterpret_cast<uint32_t (*)[kTileKeys / 16][4]>(r_d.data());

  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  Ring<kDerivatives> derivatives;
  for (;; ring.advance()) {
    wait(&shared.full[ring.slot], ring.parity);
    if (read_for_warp(shared.steps[ring.slot].first_entry) == kAllEnd) break;
    const int group = read_for_warp(shared.steps[ring.slot].group);
    const int count = read_for_warp(shared.steps[ring.slot].count), at = count % kGroups;
    wait(&shared.q_full[at], count / kGroups % 2);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      load_matrices(shared_address(shared.q[at] + i / 4 * kRows * kChunkColumns) +
                        swizzled_offset(first_row + matrix_row, i % 4 * 2 + matrix_piece),
                    q_pairs[i]);
    }
    const float weights[2] = {shared.weights[at][row], shared.weights[at][row + 8]};
    clear(r_sum);
    for (;; ring.advance()) {
      wait(&shared.full[ring.slot], ring.parity);
      const auto& step = shared.steps[ring.slot];
      if (read_for_warp(step.first_entry) == kGroupEnds) break;
      const auto s_keys = make_tensor(make_smem_ptr(shared.keys[ring.slot]), RowsByColumns<kColumns>{});
      const auto s_columns = make_tensor(make_smem_ptr(shared.keys[ring.slot]), ColumnsByRows<kColumns>{});
      const auto r_keys = score_mma.get_slice(thread).partition_fragment_B(s_keys);
      const auto r_columns = rows_mma.get_slice(thread).partition_fragment_B(s_columns);
      fence_async_proxy();
      warpgroup_fence_operand(r_q);
      warpgroup_fence_operand(r_s);
      warpgroup_arrive();
      multiply(score_mma, r_q, r_keys, r_s);
      warpgroup_commit_batch();
      wait(&shared.derivatives_empty[derivatives.slot], derivatives.parity ^ 1);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);
      compute_derivatives<kHeads>(r_s, step.gradients, weights, row, lane, pairs,
                                  shared_address(shared.derivatives[derivatives.slot]), first_row + matrix_row);
      fence_async_proxy();
      arrive(&shared.derivatives_full[derivatives.slot]);
      derivatives.advance();
      warpgroup_fence_operand(r_d);
      warpgroup_fence_operand(r_sum);
      warpgroup_arrive();
      multiply_add(rows_mma, r_d, r_columns, r_sum);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_sum);
      arrive(&shared.empty[ring.slot]);
    }
    arrive(&shared.empty[ring.slot]);
    arrive(&shared.q_empty[at]);

    if (thread == 0) tma_store_wait_read();  // of the previous group
    sync_warpgroup(kRowsBarrier + warpgroup);
    float dweights[2] = {};
    store_dq<kColumns>(r_sum, q_pairs, weights, dweights, shared_address(shared.dq[warpgroup]), matrix_row,
                       matrix_piece);
    fence_async_proxy();
    sync_warpgroup(kRowsBarrier + warpgroup);
    const int first_query = p.first_query + group * queries_of_group(kHeads);
    if (thread == 0) {
      for (int chunk = 0; chunk < kColumns / kChunkColumns; ++chunk) {
        tma_store(&dq_map, shared.dq[warpgroup] + chunk * kWarpgroupRows * kChunkColumns,
                  {chunk * kChunkColumns, 0, 0, first_query + first_row / kHeads, 0});
      }
      tma_store_commit();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dweights[r] += __shfl_xor_sync(~0u, dweights[r], 1);
      dweights[r] += __shfl_xor_sync(~0u, dweights[r], 2);
      if (lane % 4 == 0 && first_query + (row + r * 8) / kHeads < p.seq) {
        p.dweights[static_cast<int64_t>(first_query) * kHeads + row + r * 8] = dweights[r];
      }
    }
  }
  if (thread == 0) tma_store_wait_read();
}

}  // namespace dsa::indexer_bwd
