// Shared memory of the kernel for packed keys and up to 64 heads of an item.
#pragma once

#include <cstdint>

#include "feeder.cuh"
#include "items.cuh"
#include "sm90/mbarrier.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kWideHeads = 64;                    // of an item
inline constexpr int kTiles = 3, kProbsStages = 2;       // stages
inline constexpr int kHalfColumns = kPackedColumns / 2;  // of a value warpgroup
inline constexpr int kSharedQChunk = 5;                  // the first that registers do not hold

template <int kColumns, bool kPaired>
struct WideStorage {
  alignas(1024) Bf16 tiles[kTiles][kColumns * kWideKeys];  // in chunks of 64 columns
  // P for each value warpgroup, [64 heads x 64]: keys times the factors of one group of columns, then of the other.
  alignas(1024) Bf16 probs[kProbsStages][2][kWideHeads * 2 * kWideKeys];
  alignas(1024) Bf16 q[kColumns - kSharedQChunk * kChunkColumns][kWideHeads];  // in chunks of 64 columns
  RawKeys<kColumns, kPaired> raw;
  PlaceTable<kPaired> places;
  KeyNotes notes[kTiles][2];                  // of the first keys of a tile, and of the others
  float sinks[kWideHeads];                    // of the item, in units of log 2
  float finish[kProbsStages][kWideHeads];     // factor of O after an item's last tile
  uint8_t rescale[kProbsStages][kWideHeads];  // of O before the tile is added: exponent bits
  int finished_item[kProbsStages];            // whose last tile this is, or -1
  uint64_t full[kTiles], probs_written[kProbsStages], probs_read[kProbsStages];
  // The peer arrives at these: it has all of the tile, and its front or back half of the slot is free for the next one.
  uint64_t received[kTiles], peer_free[2][kTiles];
};

}  // namespace dsa::sparse_mla_decode
