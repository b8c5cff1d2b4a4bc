// Up to 32 heads ("narrow"): S^T = K Q^T and O^T += V^T P^T, with heads as columns, so that few heads cost little.
//
// Who does what, for tile j of an item:
//
//   warpgroup         waits on                       does                                         signals
//   score             full_front[j], full_back[j]    S^T = K Q^T; softmax; P^T into the tile      probs_written[j]
//                                                    after the last tile: factor of O             finished
//   value 0 (front)   probs_written[j]               O[:, 0:256) = O * rescale + P V              probs_read[j]
//                                                    gathers columns [0, 256) of tile j+3         full_front[j+3]
//   value 1 (back)    probs_written[j]               O[:, 256:512) = O * rescale + P V
//                     probs_read[j]                  gathers the other columns of tile j+2        full_back[j+2]
//   value 0, 1        finished                       after Q of the next item: scale and store O
//
// The time goes into reading keys and values from shared memory, and into the gather. Q is the B operand of wgmma and
// stays in shared memory, which leaves room for three stages of front halves and two of back halves.
#pragma once

#include "feeder.cuh"
#include "output.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/columns.cuh"

namespace dsa::sparse_mla_fwd {

// With kMax, the largest scores of a thread's heads: of its own keys, then of the warpgroup's in threads 0 to 3.
template <Config kC, bool kMax, int kColumns>
struct LargestScores {
  float of[kColumns];

  __device__ __forceinline__ LargestScores() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) of[c] = -INFINITY;
  }
  __device__ __forceinline__ void add(const float (&top)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) of[c] = fmaxf(of[c], top[c]);
  }
  // Called by all threads of the warpgroup.
  __device__ __forceinline__ void reduce(SharedStorage<kC>& shared, int thread) {
    const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) {
        of[c] = fmaxf(of[c], __shfl_xor_sync(~0u, of[c], lanes));
      }
      if (lane < 4) shared.q.columns[warp][column_in_row(c, lane)] = of[c];
    }
    sync_warpgroup<kScoreBarrier>();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int w = 0; w < kWarpsPerWarpgroup; ++w) of[c] = fmaxf(of[c], shared.q.columns[w][column_in_row(c, lane)]);
    }
    sync_warpgroup<kScoreBarrier>();
  }
  __device__ __forceinline__ float operator[](int c) const { return of[c]; }
};
template <Config kC, int kColumns>
struct LargestScores<kC, false, kColumns> {
  __device__ __forceinline__ void add(const float (&)[kColumns]) {}
  __device__ __forceinline__ void reduce(SharedStorage<kC>&, int) {}
  __device__ __forceinline__ float operator[](int) const { return 0.f; }
};

// Sums over the warpgroup's keys, and what becomes of each head at the end of an item.
template <Config kC, bool kMax, int kColumns>
__device__ __forceinline__ void finish_heads(SharedStorage<kC>& shared, const KernelParams& p, int index, int slot,
                                             const float (&column_max)[kColumns], float (&column_sum)[kColumns],
                                             LargestScores<kC, kMax, kColumns>& largest, int thread) {
  const int lane = thread % kWarpThreads;
  const auto head = [&](int c) { return column_in_row(c, lane); };
  largest.reduce(shared, thread);
  sum_columns<kScoreBarrier>(shared.q.columns, column_sum, thread);
  if (thread < 4) {
    const auto item = item_at(shared, p, index);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      shared.finish[slot][head(c)] = finish_row<kC>(p, item, head(c), column_max[c], column_sum[c]);
      if constexpr (kMax) finish_max(p, item, head(c), column_max[c], column_sum[c], largest[c]);
    }
  }
}

template <Config kC, bool kMax>
__device__ __forceinline__ void score_narrow(SharedStorage<kC>& shared, const KernelParams& p, int thread) {
  using namespace cute;
  constexpr int kFrontColumns = kFrontChunks * kChunkColumns;
  constexpr int kHeads = kC.heads, kColumns = kHeads / 4;  // kColumns: heads of a thread's fragment of S^T
  constexpr int kPieces = kHeads * kSwizzleRowBytes / 16;  // 16-byte pieces in a chunk of Q
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const uint32_t flip = p.negate_q ? 0x80008000u : 0u;
  const auto head = [&](int c) { return column_in_row(c, lane); };

  NarrowScoreMma<kHeads> mma;
  Tensor s_q = make_tensor(make_smem_ptr(shared.q.chunks), HeadsByColumns<kHeads, kC.d_qk>{});
  Tensor r_q = mma.get_slice(thread).partition_fragment_B(s_q);
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kHeads>>{});
  Ring<kC.front_stages> front_at;
  Ring<kC.back_stages> back_at;
  Ring<2> finish_at;

  for (int index = blockIdx.x; index < items_of(shared, p); index += gridDim.x) {
    wait(&shared.full_front[front_at.slot], front_at.parity);
    wait(&shared.full_back[back_at.slot], back_at.parity);
    const int tiles = shared.item_tiles[front_at.parity][front_at.slot];
    for (int i = thread; i < kC.d_qk / kChunkColumns * kPieces; i += kWarpgroupThreads) {
      const int chunk = i / kPieces;
      const Bf16* from = shared.tiles.chunk(chunk < kFrontChunks ? front_at.slot : back_at.slot, chunk);
      const uint4 v = reinterpret_cast<const uint4*>(from)[i % kPieces];
      reinterpret_cast<uint4*>(shared.q.chunks)[i] = {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip};
    }
    fence_async_proxy();
    sync_warpgroup<kScoreBarrier>();
    arrive(&shared.probs_written[back_at.slot]);
    front_at.advance();
    back_at.advance();

    float column_max[kColumns], column_sum[kColumns];  // column_sum is of this thread's keys only
#pragma unroll
    for (int c = 0; c < kColumns; ++c) column_max[c] = -INFINITY, column_sum[c] = 0.f;
    LargestScores<kC, kMax, kColumns> largest;
    for (int j = 0; j < tiles; ++j) {
      // S^T = K Q^T
      Tensor s_front = make_tensor(make_smem_ptr(shared.tiles.chunk(front_at.slot, 0)), RowsByColumns<kFrontColumns>{});
      Tensor s_back = make_tensor(make_smem_ptr(shared.tiles.chunk(back_at.slot, kFrontChunks)),
                                  RowsByColumns<kC.d_qk - kFrontColumns>{});
      Tensor r_front = mma.get_slice(thread).partition_fragment_A(s_front);
      Tensor r_back = mma.get_slice(thread).partition_fragment_A(s_back);
      wait(&shared.full_front[front_at.slot], front_at.parity);
      wait(&shared.full_back[back_at.slot], back_at.parity);
      fence_async_proxy();
      warpgroup_fence_operand(r_s);
      warpgroup_arrive();
      multiply(mma, r_front, r_q, r_s);
#pragma unroll
      for (int k = 0; k < size<2>(r_back); ++k) gemm(mma, r_back(_, _, k), r_q(_, _, size<2>(r_front) + k), r_s);
      warpgroup_commit_batch();
      // Whether this thread's keys, rows lane / 4 and lane / 4 + 8 of its warp's 16, are visible.
      bool visible[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        visible[r] = shared.visible[front_at.slot][row / 4] >> (row % 4 * 8 + warp) & 1;
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) r_s(i) = visible[i / 2 % 2] ? r_s(i) * p.scale_log2 : -INFINITY;

      // P = 2^(S * scale - max), with a running maximum that may lag behind
      bool raise = false;
      float top[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        top[c] = fmaxf(r_s(c / 2 * 4 + c % 2), r_s(c / 2 * 4 + c % 2 + 2));
        raise |= top[c] > column_max[c] + kRescaleStep;
      }
      largest.add(top);
      int exponents[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) exponents[c] = kExponentOfOne;
      // This barrier also waits until every warp has read chunk 8, which P overwrites.
      if (any_of_warpgroup(kScoreBarrier, raise)) {
        raise_maxima<kScoreBarrier>(shared.q.columns, top, column_max, column_sum, exponents, thread);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float base = column_max[c] == -INFINITY ? 0.f : column_max[c];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& s = r_s(c / 2 * 4 + 2 * r + c % 2);
          s = exp2_fast(s - base);
          column_sum[c] += s;
        }
        if (thread < 4) shared.rescale[back_at.slot][head(c)] = exponents[c];
      }
      store_transposed<kHeads>(shared_address(shared.tiles.chunk(back_at.slot, kLastChunk)), r_s, thread);
      fence_async_proxy();
      arrive(&shared.probs_written[back_at.slot]);
      front_at.advance();
      back_at.advance();
    }

    finish_heads<kC, kMax>(shared, p, index, finish_at.slot, column_max, column_sum, largest, thread);
    arrive(&shared.finished[finish_at.slot]);
    finish_at.advance();
  }
}

template <Config kC, bool kBack>
__device__ __forceinline__ void accumulate_narrow(SharedStorage<kC>& shared, const KernelParams& p,
                                                  const CUtensorMap& q_map, int thread) {
  using namespace cute;
  constexpr int kHeads = kC.heads, kRows = kFrontChunks * kChunkColumns;  // rows of O^T, columns of O
  constexpr int kFirst = kBack ? kFrontChunks : 0, kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  const int lane = thread % kWarpThreads;
  const auto head = [&](int i) { return column_of_value(i, lane); };  // of accumulator i of a chunk

  NarrowValueMma<kHeads> mma;
  Tensor r_o = partition_fragment_C(mma, Shape<Int<kRows>, Int<kHeads>>{});  // (of a chunk, chunks, 1)
  Feeder<kC, kBack> feeder{shared, p, q_map, thread};
  Ring<kC.front_stages> front_at;
  Ring<kC.back_stages> back_at;
  Ring<2> finish_at;
  const auto scale_heads = [&](const auto& factor) {
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      const float f = factor(head(i));
#pragma unroll
      for (int chunk = 0; chunk < kFrontChunks; ++chunk) r_o(i, chunk, 0) *= f;
    }
  };

  // This warpgroup has read the tile: the data of the next round of the ring may arrive.
  const auto refill = [&] {
    if (!kBack) arrive(&shared.probs_read[back_at.slot]);
    feeder.feed(kBack ? back_at.slot : front_at.slot, kBack ? back_at.parity : front_at.parity);
    front_at.advance();
    back_at.advance();
  };

  for (int i = 0; i < (kBack ? kC.back_stages : kC.front_stages); ++i) feeder.feed(i, 1);
  for (int index = blockIdx.x;; index += gridDim.x) {
    int tiles_left = 0;
    if (index < items_of(shared, p)) {
      wait(&shared.probs_written[back_at.slot], back_at.parity);  // the score warpgroup has read Q
      tiles_left = shared.item_tiles[front_at.parity][front_at.slot];
      refill();
    }
    if (index != blockIdx.x) {
      // O of the item before, while the first tiles of this one are scored
      wait(&shared.finished[finish_at.slot], finish_at.parity);
      scale_heads([&](int h) { return shared.finish[finish_at.slot][h]; });
      finish_at.advance();
      store_output_transposed<kFirst, kC.d_v, kHeads>(p, item_at(shared, p, index - gridDim.x), r_o, thread);
    }
    if (tiles_left == 0) break;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    for (; tiles_left > 0; --tiles_left) {
      const int slot = kBack ? back_at.slot : front_at.slot;  // slot of this warpgroup's values
      Tensor s_v = make_tensor(make_smem_ptr(shared.tiles.chunk(slot, kFirst)), ColumnsByRows<kRows>{});
      Tensor s_p =
          make_tensor(make_smem_ptr(shared.tiles.chunk(back_at.slot, kLastChunk)), HeadsByColumns<kHeads, kTileRows>{});
      Tensor r_v = mma.get_slice(thread).partition_fragment_A(s_v);
      Tensor r_p = mma.get_slice(thread).partition_fragment_B(s_p);
      wait(&shared.probs_written[back_at.slot], back_at.parity);
      if (__any_sync(~0u, shared.rescale[back_at.slot][lane % kHeads] != kExponentOfOne)) {
        scale_heads([&](int h) { return power_of_two(shared.rescale[back_at.slot][h]); });
      }
      warpgroup_fence_operand(r_o);
      warpgroup_arrive();
      multiply_add(mma, r_v, r_p, r_o);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      sync_warpgroup<kBarrier>();
      refill();
    }
  }
}

}  // namespace dsa::sparse_mla_fwd
