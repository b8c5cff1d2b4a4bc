// Shared memory of the kernel of few heads.
#pragma once

#include "items.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::sparse_mla_decode {

// Two value warpgroups and one that scores; each needs all 168 registers.
inline constexpr int kNarrowThreads = 3 * kWarpgroupThreads;
inline constexpr int kNarrowStages = 2;  // of tiles
inline constexpr int kProbsStages = 2;   // of P
// Of what ends an item. P of an item may be written before O of the item two before it is scaled, where these have one
// tile each; a third one is then not.
inline constexpr int kFinishStages = kProbsStages + 1;
inline constexpr int kStepColumns = 16;  // K of one wgmma
inline constexpr int kChunkBytes = kChunkElements * sizeof(Bf16);
inline constexpr int kValueChunks = kValueColumns / kChunkColumns;
static_assert(kTileRows == kTileKeys);

template <int kColumns, int kHeads>
struct NarrowStorage {
  alignas(1024) Bf16 tiles[kNarrowStages][kColumns * kTileRows];  // in chunks of 64 columns, like the others
  alignas(1024) Bf16 q[kColumns * kHeads];
  alignas(1024) Bf16 probs[kProbsStages][kScaleGroups][kHeads * kTileRows];  // P^T times a group's scales
  float scales[kNarrowStages][kScaleGroups][kTileRows];                      // of a tile's keys
  uint8_t visible[kNarrowStages][kTileRows];
  uint8_t rescale[kProbsStages][kHeads];  // of O before the tile is added: exponent bits
  int is_last_tile[kProbsStages];         // of its item; arrives with P
  float finish[kFinishStages][kHeads];    // factor of O after the last tile of an item
  float of_warps[kWarpsPerWarpgroup][kHeads];
  uint64_t full_front[kNarrowStages], full_back[kNarrowStages], finished[kFinishStages];
  uint64_t probs_written[kProbsStages], probs_read[kProbsStages];
};

}  // namespace dsa::sparse_mla_decode
