// The value warpgroups: O += P V for one half of the value columns each, and the store of O.
#pragma once

#include "sm90/math.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "storage.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/online_softmax.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kHalfColumns = kValueColumns / 2;
inline constexpr int kHalves = kHalfColumns / kScaleColumns;  // blocks of columns with their own scales, in a half

// The end of an item for one value warpgroup, which then needs nothing more from the score warpgroup but values.
template <Config kC, bool kBack, class Output>
__device__ __forceinline__ void store_output(SharedStorage<kC>& shared, const KernelParams& p, const Item& item,
                                             int slot, Output& r_o, const float (&row_sum)[2]) {
  constexpr int kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  const int thread = warpgroup_thread(), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int row = fragment_row();
  const float row_max[2] = {shared.row_max[row], shared.row_max[row + 8]};
  arrive(&shared.probs_read);
  const int heads_left = min(item.heads_left(p), kC.heads);
  const bool is_part = p.plan.splits > 1;
  const int64_t first_row = item.first_row(p) + (is_part ? item.split * p.rows : 0);
  float factors[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = row + 8 * r;
    const bool exists = head < heads_left, empty = row_sum[r] == 0.f;
    float denominator = row_sum[r];
    if (exists && p.attn_sink != nullptr && !is_part) {
      const float sink = p.attn_sink[(item.first_head(p) + head) * p.attn_sink_stride];
      denominator += exp2_fast(sink * kLog2E - row_max[r]);
    }
    factors[r] = empty ? 0.f : 1.f / denominator;
    if (exists && !kBack && lane % 4 == 0) {
      float* g_lse = is_part ? p.partial_lse : p.lse;
      const float empty_lse = is_part ? -INFINITY : p.empty_lse;
      g_lse[first_row + head] = empty ? empty_lse : kLn2 * log_of_sum(row_max[r], log2f(row_sum[r]));
    }
  }
#pragma unroll
  for (int i = 0; i < cute::size(r_o); ++i) r_o(i) *= factors[i / 2 % 2];

  if (is_part) {  // in the order of columns in shared memory
    float* g_out = p.partial_out + (first_row + row) * kValueColumns + kBack * kHalfColumns + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= heads_left) break;
#pragma unroll
      for (int i = 2 * r; i < cute::size(r_o); i += 4) {
        *reinterpret_cast<float2*>(g_out + 8 * r * kValueColumns + i / 4 * 8) = {r_o(i), r_o(i + 1)};
      }
    }
    return;
  }
  // O overwrites the values that only this warpgroup read. Each warp then stores its own rows.
  sync_warpgroup<kBarrier>();
  Bf16* s_out = shared.values[slot] + kBack * kHalfColumns * kTileRows;
  store_accumulators<kHalfColumns>(shared_address(s_out), r_o, thread);
  __syncwarp();
  auto* g_out = static_cast<Bf16*>(p.out) + first_row * kValueColumns + kBack * kHalfColumns + lane * kPieceColumns;
  const char* s_lane = reinterpret_cast<const char*>(s_out) + lane / 8 * kChunkBytes;
#pragma unroll 4
  for (int head = warp * 16; head < min(warp * 16 + 16, heads_left); ++head) {
    Piece piece;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      piece.words[j] = *reinterpret_cast<const uint32_t*>(s_lane + pair_offset(head, lane % 8, j, kC.is_packed));
    }
    *reinterpret_cast<Piece*>(g_out + int64_t{head} * kValueColumns) = piece;
  }
}

template <Config kC, bool kBack>
__device__ __forceinline__ void accumulate(SharedStorage<kC>& shared, const KernelParams& p) {
  using namespace cute;
  constexpr int kOperands = kC.is_packed ? kHalves : 1;  // of a step: P times the factors of each block of columns
  constexpr int kSteps = 2 / kOperands;                  // whose operands fit into the registers beside O

  RowsMma<kScaleColumns> mma;
  Tensor r_o = partition_fragment_C(mma, Shape<_64, Int<kHalfColumns>>{});
  Tensor r_p = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _2>{});
  uint32_t* p_words = reinterpret_cast<uint32_t*>(r_p.data());
  mma.accumulate_ = GMMA::ScaleOut::One;
  unsigned tile = 0;  // of all items
  int item;
  do {
    clear(r_o);
    float row_sum[2] = {0.f, 0.f};
    while (true) {
      const int slot = tile % kStages;
      const int thread = warpgroup_thread(), row = fragment_row();
      Tensor s_v = make_tensor(make_smem_ptr(shared.values[slot] + kBack * kHalfColumns * kTileRows),
                               ColumnsByRows<kHalfColumns>{});
      Tensor r_v = mma.get_slice(thread).partition_fragment_B(s_v);
      wait(&shared.full[slot], tile / kStages % 2);
      const int exponents[2] = {shared.rescale[row], shared.rescale[row + 8]};
      if (__any_sync(~0u, (exponents[0] & exponents[1]) != kExponentOfOne)) {
        const float factors[2] = {power_of_two(exponents[0]), power_of_two(exponents[1])};
        row_sum[0] *= factors[0], row_sum[1] *= factors[1];
#pragma unroll
        for (int i = 0; i < size(r_o); ++i) r_o(i) *= factors[i / 2 % 2];
      }
      // Of each row, a step takes the probabilities of four keys: 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of 16, t = lane % 4.
      const int first = thread % 4 * 4;
      const uint32_t s_probs = shared_address(shared.probs + probs_offset(row, first));
      const uint32_t s_factors = shared_address(&shared.factors[0][first]);
      warpgroup_fence_operand(r_o);
#pragma unroll
      for (int step = 0; step < kTileRows / 16; ++step) {
        if (step >= kSteps) warpgroup_wait<kSteps - 1>();  // the operands of an earlier step are free
        uint32_t* words = p_words + step % kSteps * kOperands * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float4 v = load_shared((s_probs ^ step % 2 * 64) + step / 2 * 128 + r * 8 * kTileRows * 4);
#pragma unroll
          for (int n = 0; n < kOperands; ++n) {
            float4 f{1.f, 1.f, 1.f, 1.f};
            if constexpr (kC.is_packed) {
              // Loaded once more for the second row: there are no registers to keep them.
              f = load_shared(s_factors + ((kBack * kHalves + n) * kTileRows + 16 * step) * 4);
            }
            words[4 * n + r] = pack_bf16(v.x * f.x, v.z * f.z);
            words[4 * n + 2 + r] = pack_bf16(v.y * f.y, v.w * f.w);
          }
        }
        warpgroup_arrive();
#pragma unroll
        for (int n = 0; n < kHalves; ++n) {
          gemm(mma, r_p(_, 0, step % kSteps * kOperands + n % kOperands), r_v(_, n, step), r_o(_, 0, n));
        }
        warpgroup_commit_batch();
      }
      // While the last product runs. Here the probabilities are loaded again: above there are no registers for the
      // sums.
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 v = load_shared((s_probs ^ i % 2 * 64) + i / 2 % 2 * 128 + i / 4 * 8 * kTileRows * 4);
        row_sum[i / 4] += v.x + v.y + (v.z + v.w);
      }
      item = shared.finished_item;
      if (item >= 0) break;
      arrive(&shared.probs_read);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      arrive(&shared.empty[slot]);
      ++tile;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_o);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    }
    store_output<kC, kBack>(shared, p, Item(p, item), tile % kStages, r_o, row_sum);
    arrive(&shared.empty[tile % kStages]);
    ++tile;
  } while (item + static_cast<int>(gridDim.x) < p.items);
}

}  // namespace dsa::sparse_mla_decode
