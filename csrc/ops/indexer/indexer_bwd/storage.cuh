// Shared memory of the gradients' kernel.
#pragma once

#include <cstdint>

#include "config.h"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_bwd {

using namespace dsa::tiles;

static_assert(kTileKeys == kTileRows && kGatherRows == kTileRows && kChunkColumns == tiles::kChunkColumns);

inline constexpr int kRowsBarrier = 1;  // and 2; 0 is __syncthreads

// One stage: a tile, or, with one of these as first_entry, the end of a group or of all groups.
inline constexpr int kGroupEnds = -1, kAllEnd = -2;

template <int kQueries>
struct Step {
  alignas(16) int ids[kTileKeys];                        // -1 after the last
  alignas(16) uint16_t gradients[kQueries * kTileKeys];  // bf16 [queries, keys]
  int first_entry;                                       // index in the group, or kGroupEnds or kAllEnd
  int group;
  int count;  // of this CTA's earlier groups
};

template <int kColumns, int kHeads>
struct SharedStorage {
  static constexpr int kTiles = tiles_in_flight(kColumns);
  alignas(1024) Bf16 q[kGroups][kRows * kColumns];  // in chunks of 64 columns
  alignas(1024) Bf16 keys[kTiles][kTileKeys * kColumns];
  alignas(1024) Bf16 derivatives[kDerivatives][kRows * kTileKeys];  // w D
  alignas(1024) Bf16 dq[kRowWarpgroups][kWarpgroupRows * kColumns];
  float weights[kGroups][kRows];
  Step<queries_of_group(kHeads)> steps[kTiles];
  uint64_t q_landed[kGroups], q_full[kGroups], q_empty[kGroups];
  uint64_t full[kTiles], empty[kTiles];
  uint64_t derivatives_full[kDerivatives], derivatives_empty[kDerivatives];
};

}  // namespace dsa::indexer_bwd
