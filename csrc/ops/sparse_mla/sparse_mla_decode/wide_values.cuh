// The value warpgroups of the wide kernel: O += P V for one half of the value columns each, the store of O, and their
// halves of the keys.
#pragma once

#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/online_softmax.cuh"
#include "wide_keys.cuh"
#include "wide_pair.cuh"

namespace dsa::sparse_mla_decode {

// O [64 x 128] += P V. Half as many columns as the warpgroup has: each group has its own P.
using WideValueMma = Tiled<cute::SM90_64x128x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>>;

inline constexpr int kAbsoluteBits = 0x7fffffff, kInfinityBits = 0x7f800000;

// The largest magnitudes of a thread's two rows of a group of columns, as bits: one instruction
// compares two integers with the maximum so far.
template <class Output>
__device__ __forceinline__ void find_largest(const Output& r_o, int (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int positive = 0;
    unsigned negative = 0;  // or positive, if no number has a sign
#pragma unroll
    for (int i = 2 * r; i < cute::size(r_o); i += 4) {
      positive = __vimax3_s32(positive, __float_as_int(r_o(i)), __float_as_int(r_o(i + 1)));
      negative = __vimax3_u32(negative, __float_as_uint(r_o(i)), __float_as_uint(r_o(i + 1)));
    }
    largest[r] = max(positive, static_cast<int>(negative & kAbsoluteBits));
  }
}

// The same of finite numbers only.
template <class Output>
__device__ __forceinline__ void find_largest_finite(const Output& r_o, int (&largest)[2]) {
  largest[0] = largest[1] = 0;
#pragma unroll
  for (int i = 0; i < cute::size(r_o); ++i) {
    const int bits = __float_as_int(r_o(i)) & kAbsoluteBits;
    largest[i / 2 % 2] = max(largest[i / 2 % 2], bits < kInfinityBits ? bits : 0);
  }
}

// Stores O, times the factors of its rows, as a part in fp16. Of each row, each group of columns is multiplied by a
// power of two, so that its largest finite number is at least 2^14 (if it was 2^-112 or more) and less than 2^15;
// p.partial_unit takes the inverse. Columns are in the order of accumulators, see combine.cuh: so a quad of lanes
// writes 64 bytes at once.
template <class Output>
__device__ __forceinline__ void store_part(const KernelParams& p, const Item& item, const Output& r_o,
                                           const float (&finish)[2], bool back) {
  constexpr int kTopExponent = kExponentOfOne + 14;                  // biased, of 2^14
  constexpr int kLeastExponent = kTopExponent - kExponentOfOne + 1;  // units are at least 2^-126: normal
  const int thread = unsigned(thread_index()) % kWarpgroupThreads;
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < kHalfGroups; ++n) {
    const auto r_group = r_o(cute::_, 0, n);
    int largest[2];
    find_largest(r_group, largest);
    if (__any_sync(~0u, max(largest[0], largest[1]) >= kInfinityBits)) find_largest_finite(r_group, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = max(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = max(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      const int exponent = max(kLeastExponent, __float_as_int(__int_as_float(largest[r]) * finish[r]) >> 23);
      const float factor = finish[r] * power_of_two(kTopExponent + kExponentOfOne - exponent);
      const bool exists = row + 8 * r < item.heads_left(p);
      const int64_t part_row = item.split * p.rows + item.first_row(p) + row + 8 * r;
      const int group = back * kHalfGroups + n;
      auto* g_row = static_cast<uint16_t*>(p.partial_out) + part_row * kPackedColumns + group * kScaleColumns;
      auto* g_lane = reinterpret_cast<uint4*>(g_row) + lane % 4;
      const auto pair = [&](int i) { return pack_fp16(r_group(i) * factor, r_group(i + 1) * factor); };
#pragma unroll
      for (int i = 2 * r; i < cute::size(r_group); i += 16) {
        const uint4 piece{pair(i), pair(i + 4), pair(i + 8), pair(i + 12)};
        if (exists) g_lane[i / 16 * 4] = piece;
      }
      if (exists && lane % 4 == 0) {
        p.partial_unit[part_row * kScaleGroups + group] = power_of_two(exponent - kTopExponent + kExponentOfOne);
      }
    }
  }
}

template <class Output>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item, Output& r_o,
                                             const float (&finish)[2], bool back) {
  if (p.plan.splits > 1) return store_part(p, item, r_o, finish, back);
  const int thread = unsigned(thread_index()) % kWarpgroupThreads;
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < cute::size(r_o); ++i) r_o(i) *= finish[i / 2 % 2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < item.heads_left(p);
    const int64_t out_row = item.first_row(p) + row + 8 * r;
    Bf16* g_row = static_cast<Bf16*>(p.out) + out_row * kPackedColumns + back * kHalfColumns;
    store_row<kHalfColumns>(reinterpret_cast<Piece*>(g_row), exists, r_o, r, lane);
  }
}

// `back` is the same for a warpgroup.
template <int kColumns, bool kPaired>
__device__ __forceinline__ void accumulate_wide(WideStorage<kColumns, kPaired>& shared, const KernelParams& p,
                                                bool back) {
  using namespace cute;
  WideValueMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  Tensor r_o = partition_fragment_C(mma, Shape<_64, Int<kHalfColumns>>{});
  Unpacker<kColumns, kPaired> unpacker(shared, back);
  // The next raw keys become a tile: what is done before P is awaited, and what is done during P V. A CTA of a pair
  // unpacks all of its keys first, since they have a longer way to go until the peer's tile is full.
  const auto fill_first = [&](unsigned tile) {
    unpacker.template unpack<0>(tile % kTiles, [&] {
      if constexpr (kPaired) {
        if (Unpacker<kColumns, kPaired>::thread() == 0) wait_until_received(shared, tile);
      }
      sync_warpgroup(value_barrier(back));  // all warps have multiplied by the tile before in this slot
    });
    if constexpr (kPaired) {
      fence_async_proxy();
      arrive(&shared.unpacked[back][tile % kTiles]);
      unpacker.release();
    }
  };
  const auto fill_second = [&](unsigned tile) {
    if constexpr (!kPaired) {
      unpacker.template unpack<1>(tile % kTiles, [] {});
      fence_async_proxy();
      arrive(&shared.full[tile % kTiles]);
      unpacker.release();
    }
  };
  const auto scale_rows = [&](float a, float b) {
#pragma unroll
    for (int i = 0; i < size(r_o); ++i) r_o(i) *= i / 2 % 2 ? b : a;
  };

  // This thread's rows of O are this one and the eighth after it. Read again wherever it is needed: registers are
  // scarce.
  const auto first_row = [] {
    const unsigned thread = thread_index();
    return thread % kWarpgroupThreads / kWarpThreads * 16 + thread % kWarpThreads / 4;
  };
  for (int i = 0; i < kTiles - 1 && unpacker.has_keys(); ++i) fill_first(i), fill_second(i);
  unsigned tile = 0;  // of all items
  int item;
  do {
    float finish[2];
    clear(r_o);
    do {
      // The slot of the tile before receives the tile after the next.
      const int slot = tile % kTiles, probs_slot = tile % kProbsStages;
      const bool has_keys = unpacker.has_keys();
      if (has_keys) fill_first(tile + kTiles - 1);
      const int thread = unsigned(thread_index()) % kWarpgroupThreads, row = first_row();
      Tensor s_p = make_tensor(make_smem_ptr(shared.probs[probs_slot][back]),
                               HeadsByColumns<kWideHeads, kHalfGroups * kWideKeys>{});
      Tensor s_v = make_tensor(make_smem_ptr(shared.tiles[slot] + back * kHalfColumns * kWideKeys),
                               ColumnsByHeads<kHalfColumns, kWideKeys>{});
      Tensor r_p = mma.get_slice(thread).partition_fragment_A(s_p);
      Tensor r_v = mma.get_slice(thread).partition_fragment_B(s_v);
      wait(&shared.probs_written[probs_slot], tile / kProbsStages % 2);
      item = shared.finished_item[probs_slot];
      const int exponents[2] = {shared.rescale[probs_slot][row], shared.rescale[probs_slot][row + 8]};
      if (__any_sync(~0u, (exponents[0] & exponents[1]) != kExponentOfOne)) {
        scale_rows(power_of_two(exponents[0]), power_of_two(exponents[1]));
      }
      warpgroup_fence_operand(r_o);
      warpgroup_arrive();
#pragma unroll
      for (int n = 0; n < kHalfGroups; ++n) {
#pragma unroll
        for (int k = 0; k < size<2>(r_v); ++k) {
          gemm(mma, r_p(_, 0, n * size<2>(r_v) + k), r_v(_, n, k), r_o(_, 0, n));
        }
      }
      warpgroup_commit_batch();
      if (has_keys) fill_second(tile + kTiles - 1);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      if (item >= 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) finish[r] = shared.finish[probs_slot][first_row() + 8 * r];
        __threadfence_block();  // they are read before the slot may be written again
      }
      arrive(&shared.probs_read[probs_slot]);
      if constexpr (kPaired) free_slot_for_peer(shared, back, tile);
      ++tile;
    } while (item < 0);
    store_output(p, Item(p, item), r_o, finish, back);
  } while (item + static_cast<int>(gridDim.x) < p.items);
}

}  // namespace dsa::sparse_mla_decode
