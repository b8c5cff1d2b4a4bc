// The score warpgroup of the wide kernel: S = Q K^T, online softmax, P.
//
// Registers per thread: 64 of Q or in a pair 80, 32 of S (two sums), 48 or 32 others.
#pragma once

#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/online_softmax.cuh"
#include "tiles/softmax.cuh"
#include "wide_pair.cuh"
#include "wide_storage.cuh"

namespace dsa::sparse_mla_decode {

using WideScoreFromRegisters = Tiled<cute::SM90_64x32x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;
using WideScoreFromShared = Tiled<cute::SM90_64x32x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;

inline constexpr int kStepColumns = 16;  // of a wgmma
inline constexpr int kChunkSteps = kChunkColumns / kStepColumns, kGroupSteps = kScaleColumns / kStepColumns;
inline constexpr int register_steps(bool paired) { return shared_q_chunk(paired) * kChunkSteps; }
inline constexpr int kLaneScores = kWideHeads * kWideKeys / kWarpgroupThreads, kLaneKeys = kLaneScores / 2;

// Q of an item and its sinks. Four lanes load 32 columns of a row at once, in pieces of 8, and exchange words so that
// each has its fragments of two wgmma steps.
template <int kColumns, bool kPaired>
__device__ __forceinline__ void load_queries(WideStorage<kColumns, kPaired>& shared, const KernelParams& p,
                                             const Item& item, uint32_t* q_words) {
  constexpr int kPairs = register_steps(kPaired) / 2, kPieces = kChunkColumns / kPieceColumns;
  constexpr int kSharedPieces = (kColumns / kChunkColumns - shared_q_chunk(kPaired)) * kWideHeads * kPieces;
  const int thread = unsigned(thread_index()) % kWarpgroupThreads, lane = thread % kWarpThreads;
  const int row = thread / kWarpThreads * 16 + lane / 4, heads = item.heads_left(p);
  const auto* g_q =
      static_cast<const Bf16*>(p.q) + item.b * p.q_stride_b + item.n * p.q_stride_n + item.first_head(p) * p.q_stride_h;
  sync_warpgroup<kScoreBarrier>();  // no warp reads those of the item before any more
#pragma unroll
  for (int i = thread; i < kSharedPieces; i += kWarpgroupThreads) {
    const int chunk = i / (kWideHeads * kPieces), head = i / kPieces % kWideHeads, piece = i % kPieces;
    const Bf16* g_piece = g_q + min(head, heads - 1) * p.q_stride_h +
                          (shared_q_chunk(kPaired) + chunk) * kChunkColumns + piece * kPieceColumns;
    copy_16_bytes(shared_address(shared.q) + chunk * kWideHeads * kSwizzleRowBytes + swizzled_offset(head, piece),
                  g_piece, head < heads ? 16 : 0);
  }
  commit_copies();
  if (p.attn_sink != nullptr && thread < kWideHeads) {
    const int head = item.first_head(p) + min(thread, heads - 1);
    shared.sinks[thread] = p.attn_sink[head * p.attn_sink_stride] * kLog2E;
  }
  Piece pieces[kPairs][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = row + 8 * r;
    const Bf16* g_row = g_q + head * p.q_stride_h + lane % 4 * kPieceColumns;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint4 v{};
      if (head < heads) v = load_once(g_row + i * 2 * kStepColumns);
      pieces[i][r] = {v.x, v.y, v.z, v.w};
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      transpose_in_quads(pieces[i][r], lane);
#pragma unroll
      for (int m = 0; m < 4; ++m) q_words[4 * (2 * i + m / 2) + r + m % 2 * 2] = pieces[i][r].words[m];
    }
  }
  wait_copies<0>();
  fence_async_proxy();
  sync_warpgroup<kScoreBarrier>();
}

// A lane's numbers of a row of a tile's notes, in the order of its accumulators.
struct LaneNotes {
  float of[kLaneKeys];

  __device__ __forceinline__ LaneNotes(const KeyNotes (&notes)[2], int row, int lane) {
    const uint32_t from = shared_address(&notes) + place_of_note(lane % 4 * 2, row);
    const float4 a = load_shared(from), b = load_shared(from + sizeof(KeyNotes));
    of[0] = a.x, of[1] = a.y, of[2] = a.z, of[3] = a.w, of[4] = b.x, of[5] = b.y, of[6] = b.z, of[7] = b.w;
  }
  // That of accumulator i.
  __device__ __forceinline__ float operator[](int i) const { return of[i / 4 * 2 + i % 2]; }
};

// S = Q K^T as two sums: of the front half of the columns and the tail, and of the back half. A half has two groups of
// columns. What the first has added is multiplied by the ratio of its factors to those of the second, and what both
// have added by the latter: so the products of a half share accumulators, r_front or r_back. While one half is
// multiplied by such numbers, the products of the other one run.
template <int kColumns, bool kPaired, class Queries, class Scores>
__device__ __forceinline__ void multiply_keys(WideStorage<kColumns, kPaired>& shared, int slot, const Queries& r_q,
                                              Scores& r_s, Scores& r_front, Scores& r_back, int thread) {
  using namespace cute;
  constexpr bool kTail = kColumns > kPackedColumns;
  constexpr int kSteps = kColumns / kStepColumns, kRegisterSteps = register_steps(kPaired);
  WideScoreFromRegisters mma;
  WideScoreFromShared shared_mma;
  Tensor s_k = make_tensor(make_smem_ptr(shared.tiles[slot]), HeadsByColumns<kWideKeys, kColumns>{});
  Tensor s_q = make_tensor(make_smem_ptr(&shared.q[0][0]),
                           HeadsByColumns<kWideHeads, kColumns - kRegisterSteps * kStepColumns>{});
  Tensor r_k = mma.get_slice(thread).partition_fragment_B(s_k);
  Tensor r_shared_q = shared_mma.get_slice(thread).partition_fragment_A(s_q);

  // A group of columns, or after the last one the tail.
  const auto multiply = [&](int group, auto& r_sum, GMMA::ScaleOut accumulate) {
    warpgroup_fence_operand(r_sum);
    warpgroup_arrive();
    mma.accumulate_ = shared_mma.accumulate_ = accumulate;
#pragma unroll
    for (int k = group * kGroupSteps; k < min((group + 1) * kGroupSteps, kSteps); ++k) {
      if (k < kRegisterSteps) {
        gemm(mma, r_q(_, 0, k), r_k(_, 0, k), r_sum(_, 0, 0));
      } else {
        gemm(shared_mma, r_shared_q(_, 0, k - kRegisterSteps), r_k(_, 0, k), r_sum(_, 0, 0));
      }
      mma.accumulate_ = shared_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto notes_of = [&](int row) { return LaneNotes(shared.notes[slot], row, thread % kWarpThreads); };
  const auto scale = [&](auto& r_sum, const LaneNotes& notes) {
    warpgroup_fence_operand(r_sum);
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) r_sum(i) *= notes[i];
  };

  multiply(0, r_front, GMMA::ScaleOut::Zero);
  multiply(kHalfGroups, r_back, GMMA::ScaleOut::Zero);
  LaneNotes notes = notes_of(ratio_row(0));  // their loads begin before the product is waited for
  warpgroup_wait<1>();
  scale(r_front, notes);
  multiply(1, r_front, GMMA::ScaleOut::One);
  notes = notes_of(ratio_row(1));
  warpgroup_wait<1>();
  scale(r_back, notes);
  multiply(kHalfGroups + 1, r_back, GMMA::ScaleOut::One);
  notes = notes_of(factor_row(0));
  warpgroup_wait<1>();
  scale(r_front, notes);
  if constexpr (kTail) multiply(kScaleGroups, r_front, GMMA::ScaleOut::One);
  notes = notes_of(factor_row(1));
  warpgroup_wait<0>();
  warpgroup_fence_operand(r_front);
  warpgroup_fence_operand(r_back);
#pragma unroll
  for (int i = 0; i < kLaneScores; ++i) r_s(i) = fmaf(r_back(i), notes[i], r_front(i));
}

// Two rows of a lane: the running maximum, in units of log 2, and the sum relative to it, of the lane's keys.
struct RowSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};

  // Scores in units of log 2 to P. `exponents`: of the factors that raised maxima mean for earlier sums.
  template <class Scores>
  __device__ __forceinline__ void add(Scores& r_s, int (&exponents)[2]) {
    float top[2] = {r_s(0), r_s(2)};
#pragma unroll
    for (int i = 1; i < kLaneScores; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], r_s(i));
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
    const float base[2] = {row_max[0] == -INFINITY ? 0.f : row_max[0], row_max[1] == -INFINITY ? 0.f : row_max[1]};
#pragma unroll
    for (int i = 0; i < kLaneScores; ++i) {
      r_s(i) = exp2_fast(r_s(i) - base[i / 2 % 2]);
      row_sum[i / 2 % 2] += r_s(i);
    }
  }

  // After the last tile: sums over all keys.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    }
  }
};

// Scores in units of log 2; those of hidden keys are -inf.
template <class Scores>
__device__ __forceinline__ void scale_and_hide(Scores& r_s, float scale_log2, const KeyNotes (&notes)[2], int lane) {
#pragma unroll
  for (int i = 0; i < kLaneScores; ++i) r_s(i) *= scale_log2;
  uint32_t visible[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) visible[half] = notes[half].visible;
  if ((visible[0] & visible[1]) == ~0u) return;
#pragma unroll
  for (int i = 0; i < kLaneScores; ++i) {
    // Key i / 4 * 8 + lane % 4 * 2 + i % 2.
    const uint32_t bits = visible[i / 8] >> lane % 4 * 2;
    if (!(bits & 1u << (i / 4 % 2 * 8 + i % 2))) r_s(i) = -INFINITY;
  }
}

// P times the factors of each group of columns, for the value warpgroups: of half the columns the second group, then
// the first. `factors` and `ratios`: the front half's rows; the back half's are loaded as soon as these are used.
template <int kColumns, bool kPaired, class Scores>
__device__ __forceinline__ void store_probabilities(WideStorage<kColumns, kPaired>& shared, int slot, int probs_slot,
                                                    const Scores& r_s, int thread, LaneNotes factors,
                                                    LaneNotes ratios) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane % 16, piece = lane / 16;
#pragma unroll
  for (int back = 0; back < 2; ++back) {
    const uint32_t s_probs = shared_address(shared.probs[probs_slot][back]);
#pragma unroll
    for (int group = kHalfGroups - 1; group >= 0; --group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * half + 2 * j;
          words[j] = pack_bf16(r_s(i) * factors[i], r_s(i + 1) * factors[i + 1]);
        }
        store_matrices(s_probs + swizzled_offset(row, group * 4 + half * 2 + piece), words[0], words[1], words[2],
                       words[3]);
      }
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) factors.of[i] *= ratios.of[i];
      if (back == 0 && group == 1) ratios = LaneNotes(shared.notes[slot], ratio_row(1), lane);
      if (back == 0 && group == 0) factors = LaneNotes(shared.notes[slot], factor_row(1), lane);
    }
  }
}

// Writes lse and returns the factor that turns O into the output, from a head's maximum, which may lag behind, and its
// sum.
template <int kColumns, bool kPaired>
__device__ __forceinline__ float finish_row(WideStorage<kColumns, kPaired>& shared, const KernelParams& p,
                                            const Item& item, int head, float row_max, float row_sum) {
  const bool is_part = p.plan.splits > 1, empty = row_sum == 0.f;
  float denominator = row_sum;
  if (p.attn_sink != nullptr && !is_part) denominator += exp2_fast(shared.sinks[head] - row_max);
  if (head < item.heads_left(p)) {
    float* g_lse = is_part ? p.partial_lse + item.split * p.rows : p.lse;
    const float empty_lse = is_part ? -INFINITY : p.empty_lse;
    g_lse[item.first_row(p) + head] = empty ? empty_lse : kLn2 * log_of_sum(row_max, log2f(row_sum));
  }
  return empty ? 0.f : 1.f / denominator;
}

template <int kColumns, bool kPaired>
__device__ __forceinline__ void score_wide(WideStorage<kColumns, kPaired>& shared, const KernelParams& p) {
  using namespace cute;
  const int thread = unsigned(thread_index()) % kWarpgroupThreads, lane = thread % kWarpThreads;
  const int row = thread / kWarpThreads * 16 + lane / 4;  // this thread's scores: this row and row + 8
  const float scale_log2 = p.negate_q ? -p.scale_log2 : p.scale_log2;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<register_steps(kPaired)>>{});
  Tensor r_s = partition_fragment_C(WideScoreFromRegisters{}, Shape<_64, Int<kWideKeys>>{});
  Tensor r_front = make_fragment_like(r_s), r_back = make_fragment_like(r_s);
  uint32_t* q_words = reinterpret_cast<uint32_t*>(r_q.data());

  Ring<kTiles> at;
  Ring<kProbsStages> probs_at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    int tiles;
    {
      const Item item(p, index);
      tiles = item.template tiles_of<kWideKeys>();
      load_queries(shared, p, item, q_words);
    }
    RowSoftmax softmax;
    for (int j = 0; j < tiles; ++j) {
      const bool is_last = j + 1 == tiles;
      wait(&shared.full[at.slot], at.parity);
      multiply_keys(shared, at.slot, r_q, r_s, r_front, r_back, thread);
      // Only now the tile before: so S has the tensor cores to itself, and P V of the tile before runs during the
      // softmax of this one.
      if (j > 0) arrive(&shared.probs_written[probs_at.slot ^ 1]);
      scale_and_hide(r_s, scale_log2, shared.notes[at.slot], lane);
      int exponents[2] = {kExponentOfOne, kExponentOfOne};
      // Loaded before the softmax, which hides how long that takes.
      const LaneNotes factors(shared.notes[at.slot], factor_row(0), lane);
      const LaneNotes ratios(shared.notes[at.slot], ratio_row(0), lane);
      softmax.add(r_s, exponents);
      wait(&shared.probs_read[probs_at.slot], probs_at.parity ^ 1);
      store_probabilities(shared, at.slot, probs_at.slot, r_s, thread, factors, ratios);
      if (is_last) softmax.reduce();
      if (lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int head = row + 8 * r;
          shared.rescale[probs_at.slot][head] = exponents[r];
          if (is_last) {
            shared.finish[probs_at.slot][head] =
                finish_row(shared, p, Item(p, index), head, softmax.row_max[r], softmax.row_sum[r]);
          }
        }
      }
      if (thread == 0) shared.finished_item[probs_at.slot] = is_last ? index : -1;
      fence_async_proxy();
      if (is_last) arrive(&shared.probs_written[probs_at.slot]);
      // Not ahead of the fence, which might wait for it.
      if (kPaired && thread == 0) tell_peer(&shared.received[at.slot]);
      at.advance();
      probs_at.advance();
    }
  }
}

}  // namespace dsa::sparse_mla_decode
