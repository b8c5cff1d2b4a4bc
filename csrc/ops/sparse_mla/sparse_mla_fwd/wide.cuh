// 33 to 64 heads, or the heads of a run of queries whose lists are merged ("wide"): S = Q K^T and O += P V, with heads
// as rows.
//
// Who does what, for tile j of an item:
//
//   warpgroup         waits on                            does                                   signals
//   score             full_front[j], full_back[j]         S = Q K^T                              probs_turn[j-1]
//                                                         softmax; P into the tile               probs_written[j]
//                                                         after the last tile: factor of O       probs_turn[j],
//                                                                                                finished
//   value 0 (front)   probs_written[j], probs_turn[j]     O[:, 0:256) = O * rescale + P V        probs_read[j]
//                                                         gathers columns [0, 256) of tile j+3   full_front[j+3]
//   value 1 (back)    probs_written[j], probs_turn[j]     O[:, 256:512) = O * rescale + P V
//                     probs_read[j]                       gathers the other columns of tile j+3  full_back[j+3]
//   value 0, 1        finished                            after Q of the next item: scale, store O
//
// The score warpgroup holds Q in registers, so that S reads only K from shared memory. P V of tile j waits for its
// turn: until S of tile j+1 is done. So P V fills the tensor cores during the softmax of tile j+1, and S has the tensor
// cores to itself: the score warpgroup is the critical path.
//
// Registers per thread: 128 of O and 24 others in the value warpgroups; 124 of Q, 32 of S and 24 others in the score
// warpgroup. ptxas assigns wgmma operands to registers from 24 upwards and keeps two to four for itself.
#pragma once

#include "feeder.cuh"
#include "output.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "tiles/softmax.cuh"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_fwd {

inline constexpr int kRegisterSteps = 31;  // of Q's 32 value steps; ptxas has no registers left for the last

// Multiplies rows lane/4 and lane/4 + 8 of an accumulator by one factor each.
template <class Accumulator>
__device__ __forceinline__ void scale_rows(Accumulator& r, const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < cute::size(r); ++i) r(i) *= factors[i / 2 % 2];
}

// Q, signs flipped by `flip`: value columns except the last step go into registers, the tail into its own chunk.
template <Config kC>
__device__ __forceinline__ void load_queries(SharedStorage<kC>& shared, int slot, uint32_t* q_words, uint32_t flip,
                                             int matrix_row, int matrix_piece, int thread) {
  constexpr int kTailSteps = tail_columns(kC) / kStepColumns;
  const uint32_t q_tile = shared_address(shared.tiles.chunk(slot, 0));
#pragma unroll
  for (int k = 0; k <= kRegisterSteps; ++k) {
    uint32_t words[4];
    load_matrices(q_tile + (k / 4) * kChunkBytes + swizzled_offset(matrix_row, k % 4 * 2 + matrix_piece), words);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] ^= flip;
    if (k < kRegisterSteps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q_words[4 * k + i] = words[i];
    } else {
      const uint32_t to =
          shared_address(shared.q.last_step) + matrix_row * 32 + ((matrix_piece ^ matrix_row / 4 % 2) << 4);
      store_matrices(to, words[0], words[1], words[2], words[3]);
    }
  }
  if constexpr (kTailSteps > 0) {
    const uint4* from = reinterpret_cast<const uint4*>(shared.tiles.chunk(slot, kLastChunk));
    uint4* to = reinterpret_cast<uint4*>(shared.q.tail);
#pragma unroll
    for (int i = thread; i < kChunkBytes / 16; i += kWarpgroupThreads) {
      const uint4 v = from[i];
      to[i] = {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip};
    }
  }
}

// Two rows of a lane: the running maximum, in units of log 2, and the sum relative to it, of the lane's columns; with
// kMax also the largest score, in the same units.
template <bool kMax>
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f}, row_top[2] = {-INFINITY, -INFINITY};

  // Follows the maximum of these scores if it is much higher; `exponents` are then those of the rows' factors.
  template <class Scores>
  __device__ __forceinline__ void raise(const Scores& r_s, float scale_log2, int (&exponents)[2]) {
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(r_s(2 * r), r_s(2 * r + 1));
#pragma unroll
      for (int i = 2 * r + 4; i < 32; i += 4) top[r] = fmaxf(top[r], fmaxf(r_s(i), r_s(i + 1)));
      top[r] *= scale_log2;
      if constexpr (kMax) row_top[r] = fmaxf(row_top[r], top[r]);
    }
    if (__any_sync(~0u, top[0] > row_max[0] + kRescaleStep || top[1] > row_max[1] + kRescaleStep)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = raised_max(row_max[r], fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2)));
        exponents[r] = rescale_bits(row_max[r], top[r]);
        row_sum[r] *= power_of_two(exponents[r]);
        row_max[r] = top[r];
      }
    }
  }

  // S to P, whose sums are added.
  template <class Scores>
  __device__ __forceinline__ void add(Scores& r_s, float scale_log2) {
    float base[2] = {row_max[0] == -INFINITY ? 0.f : -row_max[0], row_max[1] == -INFINITY ? 0.f : -row_max[1]};
    if (fmaxf(fabsf(base[0]), fabsf(base[1])) > kLargeScore) {
      // In a row of large scores, fmaf does not round the product as row_max was rounded. The difference would move the
      // largest score away from 0, and its exponential would overflow or vanish.
      const bool is_large[2] = {fabsf(base[0]) > kLargeScore, fabsf(base[1]) > kLargeScore};
      const float inverse = 1.f / scale_log2;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float relative = __fadd_rn(__fmul_rn(r_s(i), scale_log2), base[i / 2 % 2]);
        if (is_large[i / 2 % 2]) r_s(i) = relative * inverse;
      }
      for (int r = 0; r < 2; ++r) base[r] = is_large[r] ? 0.f : base[r];
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i / 2 % 2;
      r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, base[r]));
      r_s(i + 1) = exp2_fast(fmaf(r_s(i + 1), scale_log2, base[r]));
      row_sum[r] += r_s(i) + r_s(i + 1);
    }
  }
};

template <class Scores>
__device__ __forceinline__ void hide(const VisibleColumns& visible, Scores& r_s) {
  if (visible.all()) return;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (!visible[i]) r_s(i) = -INFINITY;
  }
}

// P for the value warpgroups overwrites chunk 8, which only this warpgroup reads.
template <Config kC, class Scores>
__device__ __forceinline__ void store_probabilities(SharedStorage<kC>& shared, int slot, const Scores& r_s,
                                                    int matrix_row, int matrix_piece) {
  uint32_t packed[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) packed[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
  sync_warpgroup<kScoreBarrier>();
  const uint32_t s_p = shared_address(shared.tiles.chunk(slot, kLastChunk));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_matrices(s_p + swizzled_offset(matrix_row, 2 * i + matrix_piece), packed[4 * i], packed[4 * i + 1],
                   packed[4 * i + 2], packed[4 * i + 3]);
  }
}

// The entries of a tile of a merged list, two a lane. The thread index is read anew, so that what follows from it takes
// no registers between tiles.
struct ListedColumns {
  unsigned entries[2];

  __device__ __forceinline__ ListedColumns(const ListedItems& items, int tile) {
    const int place = tile * kBlockK + thread_index() % kWarpThreads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = place + half * kWarpThreads;
      entries[half] = i < items.entries ? __ldg(items.g_entries + i) : 0;
    }
  }
  // Hides the keys that the queries of the thread's two rows do not list. Called by all lanes of a warp.
  template <class Scores>
  __device__ __forceinline__ void hide_others(int heads, Scores& r_s) const {
    const int thread = thread_index() % kWarpgroupThreads, lane = thread % kWarpThreads;
    const int row_bits = __ffs(heads) - 1, row = thread / kWarpThreads * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t keys[2];  // bits 8 c and 8 c + 1: of the half's c-th eight keys, the lane's two
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = row + 8 * r >> row_bits;
        keys[r] = __ballot_sync(~0u, entries[half] >> (merged_lists::kIdBits + query) & 1) >> lane % 4 * 2;
      }
#pragma unroll
      for (int i = half * 16; i < half * 16 + 16; ++i) {
        if (!(keys[i / 2 % 2] >> (i / 4 % 4 * 8 + i % 2) & 1)) r_s(i) = -INFINITY;
      }
    }
  }
};

template <Config kC, bool kMax>
__device__ __forceinline__ void score_wide(SharedStorage<kC>& shared, const KernelParams& p, int thread) {
  using namespace cute;
  constexpr int kTailSteps = tail_columns(kC) / kStepColumns;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int matrix_row = warp * 16 + lane % 16, matrix_piece = lane / 16;  // for ldmatrix and stmatrix
  const int row = warp * 16 + lane / 4;                                    // this thread's scores: this row and row + 8
  const uint32_t flip = p.negate_q ? 0x80008000u : 0u;

  ScoreMmaFromRegisters mma;
  ScoreMmaFromShared shared_mma;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kRegisterSteps>>{});
  Tensor r_s = partition_fragment_C(mma, Shape<_64, _64>{});
  uint32_t* q_words = reinterpret_cast<uint32_t*>(r_q.data());
  Tensor s_q_last = make_tensor(make_smem_ptr(shared.q.last_step), RowsByStep{});
  Tensor r_q_last = shared_mma.get_slice(thread).partition_fragment_A(s_q_last);
  shared_mma.accumulate_ = GMMA::ScaleOut::One;

  Ring<kC.front_stages> at;
  Ring<2> finish_at;
  for (int index = blockIdx.x; index < items_of(shared, p); index += gridDim.x) {
    // Q: value columns except the last step go into registers, the tail into its own chunk.
    wait(&shared.full_front[at.slot], at.parity);
    wait(&shared.full_back[at.slot], at.parity);
    const int tiles = shared.item_tiles[at.parity][at.slot];
    load_queries<kC>(shared, at.slot, q_words, flip, matrix_row, matrix_piece, thread);
    if constexpr (kC.is_merged) {
      if (thread == 0) {
        const MergedItem item = item_at(shared, p, index);
        shared.listed.g_entries = item.g_entries;
        shared.listed.entries = item.slot_end;
      }
    }
    fence_async_proxy();
    sync_warpgroup<kScoreBarrier>();
    arrive(&shared.probs_written[at.slot]);
    arrive(&shared.probs_turn[at.slot]);
    at.advance();

    OnlineSoftmax<kMax> softmax;
    int previous_slot = 0;
    const auto signal_written = [&] {
      fence_async_proxy();
      arrive(&shared.probs_written[previous_slot]);
    };
    for (int j = 0; j < tiles; ++j) {
      // S = Q K^T
      Tensor s_k = make_tensor(make_smem_ptr(shared.tiles.chunk(at.slot, 0)), RowsByColumns<kC.d_qk>{});
      Tensor r_k = mma.get_slice(thread).partition_fragment_B(s_k);
      wait(&shared.full_front[at.slot], at.parity);
      wait(&shared.full_back[at.slot], at.parity);
      warpgroup_arrive();
      multiply(mma, r_q, r_k, r_s);
      gemm(shared_mma, r_q_last(_, _, 0), r_k(_, _, Int<kRegisterSteps>{}), r_s);
      if constexpr (kTailSteps > 0) {
        Tensor s_q_tail = make_tensor(make_smem_ptr(shared.q.tail), RowsByColumns<tail_columns(kC)>{});
        Tensor r_q_tail = shared_mma.get_slice(thread).partition_fragment_A(s_q_tail);
#pragma unroll
        for (int k = 0; k < kTailSteps; ++k) {
          gemm(shared_mma, r_q_tail(_, _, k), r_k(_, _, kRegisterSteps + 1 + k), r_s);
        }
      }
      warpgroup_commit_batch();
      if (j > 0) signal_written();
      if constexpr (kC.is_merged) {
        const ListedColumns listed(shared.listed, j);
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_s);
        if (j > 0) arrive(&shared.probs_turn[previous_slot]);
        listed.hide_others(p.heads, r_s);
      } else {
        const VisibleColumns visible(shared.visible[at.slot], lane);
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_s);
        if (j > 0) arrive(&shared.probs_turn[previous_slot]);
        hide(visible, r_s);
      }

      // P = 2^(S * scale - max), with a running maximum that may lag behind
      int exponents[2] = {kExponentOfOne, kExponentOfOne};
      softmax.raise(r_s, p.scale_log2, exponents);
      if (lane % 4 == 0) {
        shared.rescale[at.slot][row] = exponents[0];
        shared.rescale[at.slot][row + 8] = exponents[1];
      }
      softmax.add(r_s, p.scale_log2);
      store_probabilities<kC>(shared, at.slot, r_s, matrix_row, matrix_piece);
      previous_slot = at.slot;
      at.advance();
    }
    signal_written();
    arrive(&shared.probs_turn[previous_slot]);

    const auto item = item_at(shared, p, index);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.row_sum[r] += __shfl_xor_sync(~0u, softmax.row_sum[r], 1);
      softmax.row_sum[r] += __shfl_xor_sync(~0u, softmax.row_sum[r], 2);
      if constexpr (kMax) {
        softmax.row_top[r] = fmaxf(softmax.row_top[r], __shfl_xor_sync(~0u, softmax.row_top[r], 1));
        softmax.row_top[r] = fmaxf(softmax.row_top[r], __shfl_xor_sync(~0u, softmax.row_top[r], 2));
      }
      if (lane % 4 == 0) {
        shared.finish[finish_at.slot][row + 8 * r] =
            finish_row<kC>(p, item, row + 8 * r, softmax.row_max[r], softmax.row_sum[r]);
        if constexpr (kMax) {
          finish_max(p, item, row + 8 * r, softmax.row_max[r], softmax.row_sum[r], softmax.row_top[r]);
        }
      }
    }
    arrive(&shared.finished[finish_at.slot]);
    finish_at.advance();
  }
}

template <Config kC, bool kBack>
__device__ __forceinline__ void accumulate_wide(SharedStorage<kC>& shared, const KernelParams& p,
                                                const CUtensorMap& q_map, int thread) {
  using namespace cute;
  constexpr int kColumns = kFrontChunks * kChunkColumns, kFirstChunk = kBack ? kFrontChunks : 0;
  constexpr int kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;

  ValueMma mma;
  Tensor r_o = partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});
  Feeder<kC, kBack> feeder{shared, p, q_map, thread};
  Ring<kC.front_stages> at;
  Ring<2> finish_at;
  // This warpgroup has read the slot: the data of the next round of the ring may arrive.
  const auto refill = [&] {
    if (!kBack) arrive(&shared.probs_read[at.slot]);
    feeder.feed(at.slot, at.parity);
    at.advance();
  };

  for (int i = 0; i < kC.front_stages; ++i) feeder.feed(i, 1);
  feeder.template publish<1>(at.slot);
  for (int index = blockIdx.x;; index += gridDim.x) {
    int tiles_left = 0;
    if (index < items_of(shared, p)) {
      wait(&shared.probs_turn[at.slot], at.parity);  // the score warpgroup has read Q
      tiles_left = shared.item_tiles[at.parity][at.slot];
      refill();
      feeder.template publish<1>(at.slot);
    }
    if (index != blockIdx.x) {
      // O of the item before, while the first tiles of this one are scored
      wait(&shared.finished[finish_at.slot], finish_at.parity);
      scale_rows(r_o, {shared.finish[finish_at.slot][row], shared.finish[finish_at.slot][row + 8]});
      finish_at.advance();
      store_output<kFirstChunk * kChunkColumns, kC.d_v>(p, item_at(shared, p, index - gridDim.x), r_o, thread);
    }
    if (tiles_left == 0) break;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    for (;;) {
      Tensor s_p = make_tensor(make_smem_ptr(shared.tiles.chunk(at.slot, kLastChunk)), RowsByColumns<kTileRows>{});
      Tensor s_v = make_tensor(make_smem_ptr(shared.tiles.chunk(at.slot, kFirstChunk)), ColumnsByRows<kColumns>{});
      Tensor r_p = mma.get_slice(thread).partition_fragment_A(s_p);
      Tensor r_v = mma.get_slice(thread).partition_fragment_B(s_v);
      wait(&shared.probs_written[at.slot], at.parity);
      const int exponents[2] = {shared.rescale[at.slot][row], shared.rescale[at.slot][row + 8]};
      if (__any_sync(~0u, (exponents[0] & exponents[1]) != kExponentOfOne)) {
        scale_rows(r_o, {power_of_two(exponents[0]), power_of_two(exponents[1])});
      }
      wait(&shared.probs_turn[at.slot], at.parity);
      warpgroup_fence_operand(r_o);
      warpgroup_arrive();
      multiply_add(mma, r_p, r_v, r_o);
      warpgroup_commit_batch();
      const bool is_last = --tiles_left == 0;
      if (!is_last) feeder.template publish<0>(at.slot);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      sync_warpgroup<kBarrier>();
      refill();
      if (is_last) break;
    }
    // Only now for the slot before: its copies had no time to complete, and this item's last slot should not wait.
    feeder.template publish<1>(at.slot);
  }
}

}  // namespace dsa::sparse_mla_fwd
