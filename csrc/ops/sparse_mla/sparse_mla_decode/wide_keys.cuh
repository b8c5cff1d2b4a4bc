// Packed keys on their way from the cache to the tensor cores, in the wide kernel: two warps have them copied to shared
// memory as they are (raw), and the value warpgroups turn them into tiles of bf16, each its half of the columns; the
// back half includes the tail. Numbers of e4m3 are multiplied by the power of two in their scale, which is exact from
// 2^-124 on. What the rest of the scales, factors from 1 to 2, means for sums over groups of columns goes to the tile's
// notes.
//
// A thread unpacks 16 bytes at a time, to 16 columns: of one key in each round, of which a CTA has two, or as one of a
// pair one. In a round a warp has four keys, of which eight lanes unpack 128 bytes each. Lanes are in an order in which
// every eight read and write two neighboring rows of one chunk, and different banks: bit 4 and bit 2 of the lane are
// the key, bit 3 is the chunk of 64 columns, and bits 1 and 0 the 16 columns.
#pragma once

#include <cstdint>

#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "unpack.cuh"
#include "wide_storage.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kRoundKeys = 4;  // of a warp
inline constexpr int rounds_of(bool paired) { return own_keys(paired) / (kRoundKeys * kWarpsPerWarpgroup); }

// The first of the CTA's keys of a tile.
template <bool kPaired>
__device__ __forceinline__ int first_own_key() {
  if constexpr (kPaired) return unsigned(cluster_rank()) % 2 * kHalfKeys;
  return 0;
}

// Has the keys of all items copied, a key a lane. Run by two warps, each of which has half of the CTA's keys of a tile:
// a warp starts a copy every 55 clocks.
template <int kColumns, bool kPaired>
__device__ __forceinline__ void load_raw_keys(WideStorage<kColumns, kPaired>& shared, const KernelParams& p) {
  constexpr int kKeys = own_keys(kPaired) / kLoadWarps, kBytes = packed_bytes(kColumns);
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x % kWarpgroupThreads / kWarpThreads;
  const int key = warp * kKeys + lane;
  Ring<kRawStages> at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item(p, index);
    const int first_slot = item.first_tile * kTileKeys + first_own_key<kPaired>() + key;
    const int* g_ids = item.indices(p) + first_slot;
    int slots_left = lane < kKeys ? item.slot_end - first_slot : 0;  // from the lane's next one on
    const auto take_id = [&] {
      const int id = slots_left > 0 ? __ldg(g_ids) : -1;
      g_ids += kWideKeys;
      slots_left -= kWideKeys;
      return id;
    };
    int next = take_id();
    for (int tiles_left = item.tiles_of<kWideKeys>(); tiles_left > 0; --tiles_left) {
      const int id = next;
      next = take_id();
      RawStage<kColumns, kPaired>& stage = shared.raw[at.slot];
      const bool is_key = static_cast<unsigned>(id) < static_cast<unsigned>(p.slots);
      const unsigned visible = __ballot_sync(~0u, is_key);
      wait(&shared.raw_empty[at.slot], at.parity ^ 1);
      if (lane == 0) {
        stage.visible[warp] = visible;
        if (warp == 0) stage.is_end = false;
        arrive_and_expect(&shared.raw_full[at.slot], kKeys * kBytes);
      }
      if (lane < kKeys) {
        const char* g_key = is_key ? p.key(id) : zeros(blockIdx.x + key);
        bulk_load(stage.keys[key], g_key, kBytes, &shared.raw_full[at.slot]);
      }
      at.advance();
    }
  }
  wait(&shared.raw_empty[at.slot], at.parity ^ 1);
  if (lane == 0) {
    if (warp == 0) shared.raw[at.slot].is_end = true;
    arrive(&shared.raw_full[at.slot]);
  }
}

// One value warpgroup's share of the keys of all items, a raw stage after the other.
template <int kColumns, bool kPaired>
struct Unpacker {
  static constexpr bool kTail = kColumns > kPackedColumns;
  static constexpr int kTailChunk = kPackedColumns / kChunkColumns, kChunkBytes = kWideKeys * kSwizzleRowBytes;
  static constexpr int kPitch = raw_pitch(kColumns);

  WideStorage<kColumns, kPaired>& shared;
  const bool back;
  Ring<kRawStages> at;
  // Offsets of the thread's first key: in a raw stage, its 16 bytes, its scales, and its piece of the tail; in a tile,
  // its first piece and that of the tail; in a tile's notes, its first row's.
  uint32_t raw, raw_scales, raw_tail, piece, tail, note;

  __device__ __forceinline__ Unpacker(WideStorage<kColumns, kPaired>& shared, bool back) : shared(shared), back(back) {
    const int t = thread(), q = t % 4, half = t / 8 % 2;
    const int raw_key = t / kWarpThreads * (rounds_of(kPaired) * kRoundKeys) + t / 16 % 2 * 2 + t / 4 % 2;
    const int k = first_own_key<kPaired>() + raw_key;
    raw = raw_key * kPitch + back * kHalfColumns + (half * 4 + q) * kPieceBytes;
    raw_scales = raw_key * kPitch + kPackedColumns + back * kHalfGroups * 4;
    raw_tail = raw_key * kPitch + kPackedColumns + kScaleBytes + (2 * q + half) * kPieceBytes;
    piece = (back * kHalfChunks + half) * kChunkBytes + swizzled_offset(k, 2 * q);
    tail = kTailChunk * kChunkBytes + swizzled_offset(k, 2 * q + half);
    note = k / kHalfKeys * sizeof(KeyNotes) + place_of_note(k, ratio_row(back));
  }

  static __device__ __forceinline__ int thread() { return unsigned(thread_index()) % kWarpgroupThreads; }

  // Whether there is a raw stage to unpack, the same for all threads: waits until it is there.
  __device__ __forceinline__ bool has_keys() const {
    wait(&shared.raw_full[at.slot], at.parity);
    return !shared.raw[at.slot].is_end;
  }

  // Unpacks the keys of round kRound to tile `slot`; `wait_for_slot` is called before it is written. The first round of
  // the front half also says which keys are visible.
  template <int kRound, class WaitForSlot>
  __device__ __forceinline__ void unpack(int slot, WaitForSlot wait_for_slot) const {
    // Four rows further, the swizzle differs in one bit.
    const auto row = [](uint32_t offset) {
      return (offset ^ kRound * 4 * kPieceBytes) + kRound * 4 * kSwizzleRowBytes;
    };
    constexpr int kRoundNotes = kRound * (place_of_note(kRoundKeys, 0) - place_of_note(0, 0));
    const RawStage<kColumns, kPaired>& stage = shared.raw[at.slot];
    const uint32_t s_stage = shared_address(&stage) + kRound * kRoundKeys * kPitch;
    const uint32_t s_tile = shared_address(shared.tiles[slot]), s_notes = shared_address(shared.notes[slot]);
    // Two pieces of 8 columns; two chunks further, they have the same place.
    const uint32_t s_even = s_tile + row(piece), s_odd = s_even ^ kPieceBytes;
    // Loads before stores, which the compiler would not move them across.
    const float2 scales = load_shared_pair(s_stage + raw_scales);
    uint4 words[kHalfGroups], tail_words;
#pragma unroll
    for (int g = 0; g < kHalfGroups; ++g) words[g] = load_shared_words(s_stage + raw + g * kScaleColumns);
    if constexpr (kTail) tail_words = load_shared_words(s_stage + raw_tail);  // the front half does not use it
    wait_for_slot();
    const SplitScale split[kHalfGroups] = {SplitScale(scales.x), SplitScale(scales.y)};
#pragma unroll
    for (int g = 0; g < kHalfGroups; ++g) {
      const uint32_t power = split[g].power;
      store_shared(s_even + g * 2 * kChunkBytes, multiply_piece(unpack_piece(words[g].x, words[g].y), power));
      store_shared(s_odd + g * 2 * kChunkBytes, multiply_piece(unpack_piece(words[g].z, words[g].w), power));
    }
    // One lane for each key: that of its first 16 columns.
    if ((thread() & 0b1011) == 0) {
      const uint32_t s_row = s_notes + note + kRoundNotes;
      store_shared(s_row, __fdividef(split[0].factor, split[1].factor));
      store_shared(s_row + kHalfKeys * 4, split[1].factor);
    }
    if (kTail && back) store_shared(s_tile + row(tail), tail_words);
    if constexpr (kRound == 0) {
      if (!back && thread() == 0) {
        if constexpr (kPaired) {
          shared.notes[slot][first_own_key<true>() / kHalfKeys].visible =
              stage.visible[0] | stage.visible[1] << kHalfKeys / 2 | 0xffff0000;
        } else {
          shared.notes[slot][0].visible = stage.visible[0] | 0xffff0000;
          shared.notes[slot][1].visible = stage.visible[1] | 0xffff0000;
        }
      }
    }
  }

  // After the last round: the raw stage may be filled again.
  __device__ __forceinline__ void release() {
    arrive(&shared.raw_empty[at.slot]);
    at.advance();
  }
};

}  // namespace dsa::sparse_mla_decode
