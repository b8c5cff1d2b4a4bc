// Sizes of the kernel that sums over heads what the keys of a list get.
#pragma once

#include <algorithm>

namespace dsa::listed_keys {

inline constexpr int kBlockHeads = 64;  // that one partial sum is of
inline constexpr int kScoreWarpgroups = 2;
inline constexpr int kTileKeys = 64, kChunkColumns = 64;
inline constexpr int kSharedBytes = 225 * 1024;  // for Q and keys

// How one shape is computed: the heads of a group, rounded up, are the columns of the products.
struct Config {
  int columns, heads;

  // Tiles of few columns are gathered in turn by two: each tile costs one the same few hundred clocks.
  constexpr int gather_warpgroups() const { return columns <= 128 ? 2 : 1; }
  constexpr int threads() const { return (kScoreWarpgroups + gather_warpgroups()) * 128; }
  constexpr int score_registers() const { return gather_warpgroups() == 2 ? 160 : 200; }
  constexpr int gather_registers() const { return gather_warpgroups() == 2 ? 96 : 88; }

  constexpr int chunks() const { return columns / kChunkColumns; }
  // Chunks that keys arrive in together. Rows that come from HBM come faster in longer pieces; but with many heads the
  // little room that Q leaves is better filled again chunk by chunk.
  constexpr int slot_chunks() const { return heads > kBlockHeads ? 1 : columns == 576 ? 3 : std::min(2, chunks()); }
  constexpr int parts() const { return chunks() / slot_chunks(); }  // of a tile
  // Of one part each: as many as there is room for, but at most kMaxTiles tiles.
  constexpr int slots() const {
    constexpr int kMaxTiles = 12;
    const int q_bytes = heads * columns * 2, slot_bytes = kTileKeys * kChunkColumns * slot_chunks() * 2;
    return std::min(kMaxTiles * parts(), (kSharedBytes - q_bytes) / slot_bytes);
  }
  // Tiles whose keys' visibility is kept. It is read before the tile's last part is free again.
  constexpr int visible_slots() const { return slots() / parts() + 2; }
};

}  // namespace dsa::listed_keys
