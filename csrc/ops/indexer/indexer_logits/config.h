// Tile sizes and register budgets of the indexer_logits kernel.
#pragma once

#include <algorithm>

#include "tickets.h"

namespace dsa::indexer_logits {

inline constexpr int kMathWarpgroups = 4;
inline constexpr int kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
inline constexpr int kSpareThreads = 96;  // that neither multiply nor feed
inline constexpr int kPartKeys = 64, kTileParts = 4, kTileKeys = kTileParts * kPartKeys;
inline constexpr int kStartUnits = kTileParts;  // the start of a block takes as long as so many parts
static_assert((kFewestRestUnits >> kRestRounds) > kStartUnits, "tickets of which nothing is computed");
inline constexpr int kPassRows = 128;  // rows of Q per product; a row is a head of a query
inline constexpr int kMathRegisters = 112, kFeederRegisters = 32;

// One shape of the kernel: `row_bytes` is the size of a head or a key.
struct Config {
  int row_bytes, heads;
  bool above;  // only logits above a bar are kept; at least 16 heads

  constexpr int chunk_bytes() const { return std::min(row_bytes, 128); }
  constexpr int chunks() const { return row_bytes / chunk_bytes(); }
  constexpr int steps() const { return row_bytes / 32; }  // per product
  // Rows of Q in shared memory: as many as fit, so that one tile of keys serves many.
  constexpr int rows() const { return std::min(512, 65536 / row_bytes); }
  constexpr int queries() const { return rows() / heads; }
  constexpr int pass_queries() const { return kPassRows / heads; }
  constexpr int stages() const { return std::min(above ? 3 : 4, 131072 / (kTileKeys * row_bytes)); }
  // Parts of a tile that a warpgroup takes, at most.
  constexpr int warpgroup_parts() const { return kTileParts * rows() / kPassRows / kMathWarpgroups; }
  // Whether the parts of a tile that all see whole are unrolled: if there are registers for the addresses of all
  // queries.
  constexpr bool unrolls() const { return heads >= 32; }

  // Of a warp: places for what it finds above the bar, and what a tile or, if not unrolled, a part may add.
  constexpr int room() const { return row_bytes > 128 ? 128 : 256; }
  constexpr int finds() const { return kPartKeys / 4 * pass_queries() * (unrolls() ? warpgroup_parts() : 1); }
};

}  // namespace dsa::indexer_logits
