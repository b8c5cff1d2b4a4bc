// Tile sizes and register budgets of the indexer_logits_paged kernel.
#pragma once

#include <algorithm>

namespace dsa::indexer_logits_paged {

inline constexpr int kMathWarpgroups = 3;
inline constexpr int kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
inline constexpr int kTileKeys = 64;  // of one page
inline constexpr int kMaxQueries = 6;
inline constexpr int kCleanColumns = 4096;  // that a CTA fills at a time

// Rows of Q per product, for `rows` rows of a sequence; a row is a head of a query.
constexpr int pass_rows_for(int rows) { return rows <= 64 ? 64 : 128; }

// One shape of the kernel: `row_bytes` is the size of a head or a key.
struct Config {
  int row_bytes, heads, pass_rows;

  constexpr int chunk_bytes() const { return std::min(row_bytes, 128); }
  constexpr int chunks() const { return row_bytes / chunk_bytes(); }
  constexpr int tile_bytes() const { return kTileKeys * row_bytes; }
  constexpr int pass_bytes() const { return pass_rows * row_bytes; }
  constexpr int pass_queries() const { return pass_rows / heads; }
  // With products of 64 rows there is one.
  constexpr int max_passes() const { return pass_rows == 64 ? 1 : (kMaxQueries * heads + pass_rows - 1) / pass_rows; }
  constexpr int max_rows() const { return max_passes() * pass_rows; }
  // The queries of two sequences, so that one's arrive while the other's are in use; of one if they take 96 KB.
  constexpr int q_slots() const { return 2 * max_passes() * pass_bytes() <= 98304 ? 2 : 1; }
  // As many as fit; 24 small ones or 9 of 8 KB are enough for the latency of memory, and with 15 of these, calls of 10
  // to 80 us took 2 to 3 % longer. A multiple of the warpgroups, so that all tiles of a stage belong to one of them:
  // another could not tell which of two phases of its barrier has ended.
  constexpr int stages() const {
    constexpr int kRoom = 227 * 1024 - 768, kStageBytes = 288;  // scales of keys, barriers
    const int q_bytes = q_slots() * (max_passes() * pass_bytes() + max_rows() * int{sizeof(float)});
    return std::min(tile_bytes() < 8192 ? 24 : 9, (kRoom - q_bytes) / (tile_bytes() + kStageBytes)) / kMathWarpgroups *
           kMathWarpgroups;
  }
};

}  // namespace dsa::indexer_logits_paged
