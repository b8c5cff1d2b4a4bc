// Shared memory of the kernel of few heads.
#pragma once

#include "items.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kNarrowStages = 2;  // of tiles
inline constexpr int kStepColumns = 16;  // K of one wgmma
inline constexpr int kChunkBytes = kChunkElements * sizeof(Bf16);
inline constexpr int kValueChunks = kValueColumns / kChunkColumns;
static_assert(kTileRows == kTileKeys);

template <int kColumns, int kHeads>
struct NarrowStorage {
  alignas(1024) Bf16 tiles[kNarrowStages][kColumns * kTileRows];  // in chunks of 64 columns, like the others
  alignas(1024) Bf16 q[kColumns * kHeads];
  alignas(1024) Bf16 probs[kScaleGroups][kHeads * kTileRows];  // P^T times the factors of a group of columns
  float factors[kNarrowStages][kScaleGroups][kTileRows];       // of the scales of a tile's keys
  uint8_t visible[kNarrowStages][kTileRows];
  uint8_t rescale[kHeads];  // of O before the tile is added: exponent bits
  int is_last_tile;         // of its item; arrives with P
  float finish[2][kHeads];  // factor of O after the last tile, double-buffered by item
  float of_warps[kWarpsPerWarpgroup][kHeads];
  uint64_t full_front[kNarrowStages], full_back[kNarrowStages], probs_written, probs_read, finished[2];
};

}  // namespace dsa::sparse_mla_decode
