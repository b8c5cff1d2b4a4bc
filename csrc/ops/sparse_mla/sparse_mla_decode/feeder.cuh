// Packed keys on their way from the cache to the tensor cores: copied to shared memory as they are (raw), there turned
// into bf16 tiles.
//
// Each value warpgroup brings its half of the columns; the back half includes the tail. A thread copies 16 bytes at a
// time, of two keys, and turns those that it has copied itself into 16 bf16 columns: so nobody waits for other threads,
// except for the scales, which a warp shares. Numbers of e4m3 are multiplied by the power of two in their scale, which
// is exact. The rest of each scale, a factor from 1 to 2, goes to a table: it multiplies sums over a group of columns.
//
// Of the 32 keys of a tile, warp w copies keys 8 w to 8 w + 7 in two rounds of four keys by eight lanes, 128 bytes
// of a key at once. Lanes are in an order in which every eight write two neighboring rows of one chunk, and different
// banks: bit 4 and bit 2 of the lane are the key, bit 3 is the chunk of 64 columns, and bits 1 and 0 the 16 columns.
//
// A CTA of a pair brings only 16 keys, the first or the last of each tile, in one round: warp w the four from 4 w on.
#pragma once

#include <cstdint>
#include <type_traits>

#include "items.cuh"
#include "ops/sparse_mla/packed_keys.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "sm90/warpgroup.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kWideKeys = 32, kHalfKeys = kWideKeys / 2;   // of a tile; of a CTA of a pair
inline constexpr int kRawStages = 2;                              // of packed keys
inline constexpr int kRoundKeys = 4;                              // of a warp
inline constexpr int kHalfGroups = kScaleGroups / 2;              // groups of columns with their own scales, of a half
inline constexpr int kHalfBytes = kPackedColumns / 2;             // of a packed key
inline constexpr int kPieceBytes = 16;                            // of a copy
inline constexpr int kTailOffset = kPackedColumns + kScaleBytes;  // in a packed key

// Rounds of keys of a stage: a thread copies and unpacks one key in each.
constexpr int rounds_of(bool paired) { return paired ? 1 : 2; }

// A stage of raw keys of one warpgroup: pieces by thread, then the four scales of each key.
constexpr int raw_pieces(int d_qk, bool paired, bool back) {
  return rounds_of(paired) * (kHalfGroups + (back && d_qk > kPackedColumns));
}
constexpr int raw_stage_bytes(int d_qk, bool paired, bool back) {
  return raw_pieces(d_qk, paired, back) * kWarpgroupThreads * kPieceBytes + rounds_of(paired) * kHalfKeys * kScaleBytes;
}

template <int kColumns, bool kPaired>
struct RawKeys {
  alignas(16) char front[kRawStages][raw_stage_bytes(kColumns, kPaired, false)];
  alignas(16) char back[kRawStages][raw_stage_bytes(kColumns, kPaired, true)];
};

// Where a thread reads and writes when it unpacks a key: offsets of its scales in those of a raw stage, of its first
// piece and its piece of the tail in a tile, and of its factors in a tile's notes.
struct alignas(16) Places {
  uint32_t scales, piece, tail, factors;
};
// Of each thread that unpacks. A CTA alone computes them for each tile, since it has no room for a table.
template <bool kPaired>
using PlaceTable = Places[kPaired ? 2 * kWarpgroupThreads : 1];

// What the score warpgroup has to know about half of a tile's keys: which are visible, and factors of scales. What each
// value warpgroup writes is contiguous: `visible` and half of `factors`, and the other half.
struct KeyNotes {
  // A byte for each four keys, whose bits are the lower ones; the upper ones are set. The other bytes are not used.
  alignas(16) uint8_t visible[kPieceBytes];
  float factors[kScaleGroups * kHalfKeys];  // see place_of_factor
};

// The offset in KeyNotes of the factor of a key's group of columns: four keys of a lane are adjacent, in the order of
// its accumulators of S.
__device__ __forceinline__ constexpr int place_of_factor(int key, int group) {
  return kPieceBytes + (group * kHalfKeys + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2) * 4;
}

// One value warpgroup's share of filling the ring of tiles, for all items of the CTA one after another: raw keys travel
// kRawStages tiles ahead of those that are unpacked.
//
//   Feeder feeder(p, ...);          // the first copies begin
//   while (feeder.has_keys()) {     // the same for all threads of the warpgroup, as is what follows
//     feeder.prepare(...);          // the oldest raw stage, to a tile that is free
//     feeder.unpack(r, tile, ...);  // for each round
//     signal that it is full, after fence_async_proxy (and in a pair, send it to the other CTA: wide_pair.cuh)
//     feeder.finish();              // the next copies begin, to the same raw stage
//   }
template <int kColumns, bool kPaired, bool kBack>
struct Feeder {
  static constexpr int kRounds = rounds_of(kPaired);
  static constexpr bool kTail = kBack && kColumns > kPackedColumns;
  static constexpr int kFirstChunk = kBack ? 4 : 0, kTailChunk = 8, kChunkBytes = kWideKeys * kSwizzleRowBytes;
  static constexpr int kStageBytes = raw_stage_bytes(kColumns, kPaired, kBack);
  static constexpr int kPlaneBytes = kWarpgroupThreads * kPieceBytes;  // a piece of each thread
  static constexpr int kScalesAt = raw_pieces(kColumns, kPaired, kBack) * kPlaneBytes;
  static constexpr unsigned kHasKeys = 1u << kRounds;  // beside a bit for each of a thread's keys
  static constexpr int kStageBits = kRounds + 1;

  const KernelParams& p;
  const uint32_t s_raw, s_places;
  int index = blockIdx.x;  // the item after that of `left`
  int left = 0;            // raw stages of the item that are not copied yet
  int slots_left;          // of the item's, from this thread's first key of the next raw stage on
  const int* g_ids;        // this thread's first slot of the next raw stage
  int ids[kRounds];        // of the next raw stage
  int stage = 0;           // whose raw keys are the oldest
  unsigned stages = 0;     // kStageBits for each raw stage, those of the last one lowest: which keys are visible

  __device__ __forceinline__ Feeder(const KernelParams& p, RawKeys<kColumns, kPaired>& raw, PlaceTable<kPaired>& places)
      : p(p),
        s_raw(shared_address(kBack ? raw.back[0] : raw.front[0])),
        s_places(shared_address(places + kPaired * kBack * kWarpgroupThreads)) {
    if constexpr (kPaired) {
      const Places at = places_of(thread(), 0);
      store_shared(s_places + thread() * int(sizeof(Places)), uint4{at.scales, at.piece, at.tail, at.factors});
    }
    take_ids();
#pragma unroll 1
    for (int i = 0; i < kRawStages; ++i) load();
  }

  // A thread's place, read again wherever it is needed: registers are scarce.
  static __device__ __forceinline__ int thread() { return unsigned(thread_index()) % kWarpgroupThreads; }
  // Among the CTA's keys of a tile, in the first round; the second one is kRoundKeys further.
  static __device__ __forceinline__ int key_of(int t) {
    return t / kWarpThreads * (kRounds * kRoundKeys) + t / 16 % 2 * 2 + t / 4 % 2;
  }
  // The first of the CTA's keys of a tile.
  static __device__ __forceinline__ int first_key() {
    if constexpr (kPaired) return unsigned(cluster_rank()) % 2 * kHalfKeys;
    return 0;
  }
  // The first of the warp's keys of a tile.
  static __device__ __forceinline__ int first_of_warp(int t) {
    return first_key() + t / kWarpThreads * (kRounds * kRoundKeys);
  }
  static __device__ __forceinline__ int piece_of(int t) { return t / 8 % 2 * 4 + t % 4; }  // of 128 bytes

  // The ids of the next raw stage.
  __device__ __forceinline__ void take_ids() {
    if (left == 0) {
      if (index >= p.items) return;
      const Item item(p, index);
      index += gridDim.x;
      const int key = first_key() + key_of(thread()), first_slot = item.first_tile * kTileKeys + key;
      left = item.tiles_of<kWideKeys>();
      slots_left = item.slot_end - first_slot;
      g_ids = item.indices(p) + first_slot;
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) ids[r] = r * kRoundKeys < slots_left ? __ldg(g_ids + r * kRoundKeys) : -1;
    g_ids += kWideKeys;
    slots_left -= kWideKeys;
  }

  // Starts the copies to the stage that unpack has read last.
  __device__ __forceinline__ void load() {
    const uint32_t s_stage = s_raw + stage * kStageBytes;
    stage = stage + 1 == kRawStages ? 0 : stage + 1;
    stages <<= kStageBits;
    if (left > 0) {
      stages |= kHasKeys;
      const int t = thread(), piece = piece_of(t);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const bool is_key = static_cast<unsigned>(ids[r]) < static_cast<unsigned>(p.slots);
        stages |= is_key << r;
        const char* g_row = p.key(is_key ? ids[r] : 0);
        const int bytes = is_key ? kPieceBytes : 0;  // the others are filled with zeros
        const char* g_piece = g_row + kBack * kHalfBytes + piece * kPieceBytes;
        const uint32_t s_mine = s_stage + t * kPieceBytes;
#pragma unroll
        for (int g = 0; g < kHalfGroups; ++g) {
          copy_16_bytes(s_mine + (r * kHalfGroups + g) * kPlaneBytes, g_piece + g * kScaleColumns, bytes);
        }
        if constexpr (kTail) {
          const int from = kTailOffset + (t % 4 * 2 + t / 8 % 2) * kPieceBytes;
          copy_16_bytes(s_mine + (kRounds * kHalfGroups + r) * kPlaneBytes, g_row + from, bytes);
        }
        if (piece == 0) {
          copy_16_bytes(s_stage + kScalesAt + (key_of(t) + r * kRoundKeys) * kScaleBytes, g_row + kPackedColumns,
                        bytes);
        }
      }
      if (--left > 0 || index < p.items) take_ids();
    }
    commit_copies();
  }

  // Whether there is a raw stage to unpack.
  __device__ __forceinline__ bool has_keys() const { return stages >> (kRawStages - 1) * kStageBits & kHasKeys; }

  // The oldest raw stage becomes the tile at `s_tile`, in chunks of 64 columns: first prepare, then each round of its
  // keys, then finish. prepare of the front half also writes which keys are visible to the tile's notes.
  __device__ __forceinline__ void prepare(KeyNotes* notes) const {
    wait_copies<kRawStages - 1>();
    __syncwarp();  // the scales are copied by other lanes
    if constexpr (!kBack) publish_visible(notes, thread());
  }

  // The factors of the round's keys go to the tile's notes.
  __device__ __forceinline__ void unpack(int r, uint32_t s_tile, const KeyNotes* notes) const {
    const int t = thread();
    const uint32_t s_stage = s_raw + stage * kStageBytes, s_mine = s_stage + t * kPieceBytes;
    const Places at = kPaired ? load_places(t) : places_of(t, r);
    // Two pieces of 8 columns; two chunks further, they have the same place.
    const uint32_t s_even = s_tile + at.piece, s_odd = s_even ^ kPieceBytes;
    const uint32_t s_factors = shared_address(notes) + at.factors;
    // Loads before stores, which the compiler would not move them across; those that wait for `at` last.
    uint4 raw[kHalfGroups];
#pragma unroll
    for (int g = 0; g < kHalfGroups; ++g) raw[g] = load_shared_words(s_mine + (r * kHalfGroups + g) * kPlaneBytes);
    const float2 scales = load_shared_pair(s_stage + kScalesAt + at.scales);
#pragma unroll
    for (int g = 0; g < kHalfGroups; ++g) {
      const SplitScale scale(g == 0 ? scales.x : scales.y);
      store_shared(s_even + g * 2 * kChunkBytes, unpack_piece(raw[g].x, raw[g].y, scale.power));
      store_shared(s_odd + g * 2 * kChunkBytes, unpack_piece(raw[g].z, raw[g].w, scale.power));
      // One lane for each key: that of its first 16 columns.
      if ((t & 0b1011) == 0) store_shared(s_factors + g * kHalfKeys * 4, scale.factor);
    }
    if constexpr (kTail) {
      const uint4 tail = load_shared_words(s_mine + (kRounds * kHalfGroups + r) * kPlaneBytes);
      store_shared(s_tile + at.tail, tail);
    }
  }

  // All lanes have read the scales. The next copies begin, to the same raw stage.
  __device__ __forceinline__ void finish() {
    __syncwarp();
    load();
  }

 private:
  static __device__ __forceinline__ Places places_of(int t, int r) {
    const int raw_key = key_of(t) + r * kRoundKeys, k = first_key() + raw_key, q = t % 4, half = t / 8 % 2;
    return {.scales = uint32_t(raw_key * kScaleBytes + kBack * kHalfGroups * 4),
            .piece = uint32_t((kFirstChunk + half) * kChunkBytes + swizzled_offset(k, 2 * q)),
            .tail = uint32_t(kTailChunk * kChunkBytes + swizzled_offset(k, 2 * q + half)),
            .factors = uint32_t(first_of_warp(t) / kHalfKeys * int(sizeof(KeyNotes)) +
                                place_of_factor(k, kBack * kHalfGroups))};
  }
  // What the constructor has stored.
  __device__ __forceinline__ Places load_places(int t) const {
    const uint4 words = load_shared_words(s_places + t * int(sizeof(Places)));
    return {.scales = words.x, .piece = words.y, .tail = words.z, .factors = words.w};
  }

  __device__ __forceinline__ void publish_visible(KeyNotes* notes, int t) const {
    const unsigned oldest = stages >> (kRawStages - 1) * kStageBits;
    const int first = first_of_warp(t);
    unsigned bytes = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const unsigned lanes = __ballot_sync(~0u, oldest >> r & 1);  // the four keys' lanes are 0, 4, 16 and 20
      bytes |= ((lanes & 1) | (lanes >> 3 & 2) | (lanes >> 14 & 4) | (lanes >> 17 & 8) | 0xf0) << 8 * r;
    }
    using Bytes = std::conditional_t<kPaired, uint8_t, uint16_t>;
    static_assert(sizeof(Bytes) == kRounds);
    uint8_t* visible = notes[first / kHalfKeys].visible + first % kHalfKeys / kRoundKeys;
    if (t % kWarpThreads == 0) *reinterpret_cast<Bytes*>(visible) = static_cast<Bytes>(bytes);
  }
};

}  // namespace dsa::sparse_mla_decode
