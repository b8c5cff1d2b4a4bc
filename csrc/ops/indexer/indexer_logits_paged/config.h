// Tile sizes and register budgets of the indexer_logits_paged kernel.
#pragma once

#include <algorithm>
#include <numeric>

namespace dsa::indexer_logits_paged {

inline constexpr int kTileKeys = 64;  // of one page
inline constexpr int kMaxQueries = 6;
inline constexpr int kCleanColumns = 4096;  // that a CTA fills at a time
inline constexpr int kFeeders = 3;          // warps that load tiles
inline constexpr int kMathRegisters = 104, kSpareRegisters = 64;

// One shape of the kernel: `row_bytes` is the size of a head or a key. A row is a head of a query; a product has
// `pass_rows` of them, and those of a sequence take `max_passes` products at most.
struct Config {
  int row_bytes, heads, pass_rows, max_passes;

  constexpr int chunk_bytes() const { return std::min(row_bytes, 128); }
  constexpr int chunks() const { return row_bytes / chunk_bytes(); }
  constexpr int tile_bytes() const { return kTileKeys * row_bytes; }
  constexpr int pass_bytes() const { return pass_rows * row_bytes; }
  constexpr int pass_queries() const { return pass_rows / heads; }
  // At least two: odd lanes look at the second query of a pair, which may not exist.
  constexpr int max_queries() const { return std::max(2, max_passes * pass_queries()); }
  constexpr int max_rows() const { return max_passes * pass_rows; }
  // The queries of two sequences, so that one's arrive while the other's are in use; of one if they take 96 KB.
  constexpr int q_slots() const { return 2 * max_passes * pass_bytes() <= 98304 ? 2 : 1; }
  constexpr int stages_that_fit() const {
    constexpr int kRoom = 227 * 1024 - 1024;          // for Q and stages
    constexpr int kStageBytes = 64 * 4 + 16 + 2 * 8;  // besides keys: scales, Tile, barriers
    const int q_bytes = q_slots() * (max_passes * pass_bytes() + max_rows() * int{sizeof(float)});
    return (kRoom - q_bytes) / (tile_bytes() + kStageBytes);
  }
  // With products of 64 rows, three are faster than memory.
  constexpr int math_warpgroups() const { return pass_rows == 128 && stages_that_fit() >= 12 ? 4 : 3; }
  constexpr int math_threads() const { return math_warpgroups() * 128; }
  constexpr int threads() const { return math_threads() + 128; }
  // Four warpgroups with 64 accumulators and 32 weights take registers from the other warps.
  constexpr bool moves_registers() const { return math_warpgroups() == 4; }
  constexpr int start_registers() const { return 65536 / threads() / 8 * 8; }
  // 24 tiles of 4 KB, or 9 to 12 larger ones, are enough for the latency of memory. A multiple of the warpgroups and of
  // the feeders, so that all tiles of a stage belong to one of them: another could not tell which of two phases of its
  // barrier has ended.
  constexpr int stages() const {
    const int multiple = std::lcm(math_warpgroups(), kFeeders), most = math_warpgroups() == 4 ? 12 : 9;
    return std::min(tile_bytes() < 8192 ? 24 : most, stages_that_fit()) / multiple * multiple;
  }
};

}  // namespace dsa::indexer_logits_paged
