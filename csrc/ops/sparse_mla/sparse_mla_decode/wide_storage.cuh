// Shared memory of the kernel for packed keys and up to 64 heads of an item.
#pragma once

#include <cstdint>

#include "items.cuh"
#include "sm90/mbarrier.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kWideHeads = 64;                               // of an item
inline constexpr int kWideKeys = 32, kHalfKeys = kWideKeys / 2;     // of a tile; of half a tile
inline constexpr int kTiles = 3, kRawStages = 2, kProbsStages = 2;  // stages
inline constexpr int kHalfColumns = kPackedColumns / 2;             // of a value warpgroup
inline constexpr int kHalfGroups = kScaleGroups / 2;              // groups of columns with their own scales, of a half
inline constexpr int kHalfChunks = kHalfColumns / kChunkColumns;  // chunks of 64 columns
// The first chunk of Q that registers do not hold: without a pair there is room for one chunk less.
inline constexpr int shared_q_chunk(bool paired) { return paired ? 5 : 4; }
inline constexpr int kLoadWarps = 2;    // each copies half of the keys
inline constexpr int kPieceBytes = 16;  // of a key, read at once

// The keys of a tile that a CTA unpacks: in a pair, the first half of the tile or the second.
inline constexpr int own_keys(bool paired) { return paired ? kHalfKeys : kWideKeys; }

// From one packed key to the next: an odd multiple of 64 bytes, so that the same columns of two neighbors are in
// different banks.
inline constexpr int raw_pitch(int d_qk) {
  const int pieces = packed_bytes(d_qk) / kPieceBytes;
  return (pieces + (12 - pieces % 8) % 8) * kPieceBytes;
}

// Packed keys, as they are in the cache; zeros where there is no key.
template <int kColumns, bool kPaired>
struct RawStage {
  alignas(kPieceBytes) char keys[own_keys(kPaired)][raw_pitch(kColumns)];
  uint32_t visible[kLoadWarps];  // bit k: there is a k-th key of the warp
  bool is_end;                   // no keys, and none after it
};

// What the score warpgroup has to know about half of a tile's keys: which are visible, and rows of a number for each
// key. Each half of the columns has two rows: the ratio of its first group's factor to its second group's, and the
// latter. What each value warpgroup writes is contiguous: `visible` and the front half's rows, and the back half's.
struct KeyNotes {
  alignas(kPieceBytes) uint32_t visible;           // bit k: key k is visible; the upper 16 bits are set
  alignas(kPieceBytes) float rows[4 * kHalfKeys];  // see place_of_note
};

__device__ __forceinline__ constexpr int ratio_row(int back) { return 2 * back; }
__device__ __forceinline__ constexpr int factor_row(int back) { return 2 * back + 1; }

// The offset in KeyNotes of a key's number in a row: four keys of a lane are adjacent, in the order of its accumulators
// of S.
__device__ __forceinline__ constexpr int place_of_note(int key, int row) {
  return kPieceBytes + (row * kHalfKeys + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2) * 4;
}

template <int kColumns, bool kPaired>
struct WideStorage {
  alignas(1024) Bf16 tiles[kTiles][kColumns * kWideKeys];  // in chunks of 64 columns
  // P for each value warpgroup, [64 heads x 64]: keys times the factors of one group of columns, then of the other.
  alignas(1024) Bf16 probs[kProbsStages][2][kWideHeads * 2 * kWideKeys];
  alignas(1024) Bf16 q[kColumns - shared_q_chunk(kPaired) * kChunkColumns][kWideHeads];  // in chunks of 64 columns
  RawStage<kColumns, kPaired> raw[kRawStages];
  KeyNotes notes[kTiles][2];                  // of the first keys of a tile, and of the others
  float sinks[kWideHeads];                    // of the item, in units of log 2
  float finish[kProbsStages][kWideHeads];     // factor of O after an item's last tile
  uint8_t rescale[kProbsStages][kWideHeads];  // of O before the tile is added: exponent bits
  int finished_item[kProbsStages];            // whose last tile this is, or -1
  uint64_t raw_full[kRawStages], raw_empty[kRawStages];
  uint64_t full[kTiles], unpacked[2][kTiles], probs_written[kProbsStages], probs_read[kProbsStages];
  // The peer arrives at these: it has all of the tile, and its front or back half of the slot is free for the next one.
  uint64_t received[kTiles], peer_free[2][kTiles];
};

}  // namespace dsa::sparse_mla_decode
