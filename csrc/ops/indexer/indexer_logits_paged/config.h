// Tile sizes and register budgets of the indexer_logits_paged kernel.
#pragma once

#include <algorithm>

namespace dsa::indexer_logits_paged {

inline constexpr int kMathWarpgroups = 4;
inline constexpr int kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
inline constexpr int kTileKeys = 64;  // of one page
inline constexpr int kPassRows = 64;  // rows of Q per product; a row is a head of a query
inline constexpr int kMaxQueries = 6;
inline constexpr int kCleanColumns = 4096;  // that a CTA fills at a time

// One shape of the kernel: `row_bytes` is the size of a head or a key.
struct Config {
  int row_bytes, heads;

  constexpr int chunk_bytes() const { return std::min(row_bytes, 128); }
  constexpr int chunks() const { return row_bytes / chunk_bytes(); }
  constexpr int matrix_bytes() const { return 64 * row_bytes; }  // of one tile of keys, or of one pass over Q
  constexpr int pass_queries() const { return kPassRows / heads; }
  constexpr int max_passes() const { return (kMaxQueries * heads + kPassRows - 1) / kPassRows; }
  // The queries of two sequences, so that one's arrive while the other's are in use; of one if they take 96 KB.
  constexpr int q_slots() const { return 2 * max_passes() * matrix_bytes() <= 98304 ? 2 : 1; }
  constexpr int q_matrices() const { return q_slots() * max_passes(); }
  // As many as fit; 24 small ones, 96 KB, are enough for the latency of memory. A multiple of the warpgroups, so that
  // all tiles of a stage belong to one of them: another could not tell which of two phases of its barrier has ended.
  constexpr int stages() const {
    constexpr int kRoom = 227 * 1024 - 768, kStageBytes = 288;  // scales of keys, barriers
    const int fitting = (kRoom - q_matrices() * matrix_bytes()) / (matrix_bytes() + kStageBytes);
    return std::min(24, fitting) / kMathWarpgroups * kMathWarpgroups;
  }
};

}  // namespace dsa::indexer_logits_paged
