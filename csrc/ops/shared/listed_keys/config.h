// Tile sizes of the listed-keys kernel, which sums over heads for each listed key.
#pragma once

#include <algorithm>

namespace dsa::listed_keys {

inline constexpr int kBlockHeads = 64;  // heads per partial sum
inline constexpr int kScoreWarpgroups = 2;
inline constexpr int kTileKeys = 64, kChunkColumns = 64;
inline constexpr int kSharedBytes = 225 * 1024;  // for Q and keys

// One shape of the kernel: the heads of a group, rounded up, are the N dimension of the products.
struct Config {
  int columns, heads;
  bool unmerged = false;  // its queries are not all of a call, but those whose lists merged_lists did not merge

  // Two warpgroups take turns gathering tiles of few columns: a tile costs one warpgroup the same few hundred clocks,
  // however few its columns.
  constexpr int gather_warpgroups() const { return columns <= 128 ? 2 : 1; }
  constexpr int threads() const { return (kScoreWarpgroups + gather_warpgroups()) * 128; }
  constexpr int score_registers() const { return gather_warpgroups() == 2 ? 160 : 200; }
  constexpr int gather_registers() const { return gather_warpgroups() == 2 ? 96 : 88; }

  constexpr int chunks() const { return columns / kChunkColumns; }
  // Chunks of columns per stage. Rows arrive from HBM faster in longer pieces; but with many heads, the little room
  // that Q leaves is better refilled chunk by chunk.
  constexpr int slot_chunks() const { return heads > kBlockHeads ? 1 : columns == 576 ? 3 : std::min(2, chunks()); }
  constexpr int parts() const { return chunks() / slot_chunks(); }  // per tile
  // Stages of the ring, of one part each: as many as fit, but at most kMaxTiles tiles.
  constexpr int slots() const {
    constexpr int kMaxTiles = 12;
    const int q_bytes = heads * columns * 2, slot_bytes = kTileKeys * kChunkColumns * slot_chunks() * 2;
    return std::min(kMaxTiles * parts(), (kSharedBytes - q_bytes) / slot_bytes);
  }
  // The tile of an item with which its Q is loaded, which waits for the products of the item before. With many heads,
  // where products take the time, the first; otherwise the first for which the ring has no stage left by then, so that
  // keys never wait for Q.
  constexpr int q_tile() const { return heads > kBlockHeads ? 0 : (slots() + parts() - 1) / parts() - 1; }
  // Tiles whose visibility masks are kept. A mask is read before the tile's last part is released.
  constexpr int visible_slots() const { return slots() / parts() + 2; }
};

// How CTAs that walk over queries share them: `whole` ones, then `pieces` of each later one, which share its tiles. The
// CTAs of the last round, or of the only one, would otherwise have a query each while others have none.
struct Rounds {
  int whole, pieces;

  constexpr int items(int queries) const { return whole + (queries - whole) * pieces; }
};

// `tiles`: of a query, at most. Queries that cannot be divided have one piece.
constexpr Rounds plan_rounds(int queries, int tiles, int num_sms, bool divisible) {
  const int rest = queries % num_sms;
  if (rest == 0 || !divisible) return {queries, 1};
  return {queries - rest, std::max(1, std::min(tiles, num_sms / rest))};
}

}  // namespace dsa::listed_keys
