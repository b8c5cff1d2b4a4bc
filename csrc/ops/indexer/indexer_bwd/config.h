// Tile sizes and register budgets of the kernels of the indexer's gradients.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_bwd {

inline constexpr int kRows = 128;  // of Q, each a head of a query, per group
inline constexpr int kTileKeys = 64, kChunkColumns = 64;

constexpr int queries_of_group(int heads) { return kRows / heads; }

inline constexpr int kRowWarpgroups = 2, kWarpgroupRows = kRows / kRowWarpgroups;
inline constexpr int kGroups = 2, kDerivatives = 3;  // stages: Q of groups; w D of tiles
// Stages of key tiles.
constexpr int tiles_in_flight(int columns) { return columns == 128 ? 4 : 8; }

inline constexpr int kThreads = (kRowWarpgroups + 2) * 128, kStartRegisters = 65536 / kThreads;
// Per thread, by role.
struct Registers {
  int rows, keys, gather;
};
constexpr Registers registers_of(int columns) {
  return columns == 128 ? Registers{168, 112, 64} : Registers{152, 128, 80};
}

// Index of a query's gradient for an entry of its group: laid out as [tiles, queries, keys of a tile].
constexpr int64_t gradient_place(int64_t entry, int query, int queries) {
  return (entry / kTileKeys * queries + query) * kTileKeys + entry % kTileKeys;
}

// Groups per launch. Their entries, `bytes` per group, take at most `room`, unless a single group takes more; if many
// fit, they fill whole waves of CTAs.
constexpr int64_t groups_at_once(int64_t groups, int64_t bytes, int64_t room, int num_sms) {
  const int64_t fit = std::max<int64_t>(1, room / std::max<int64_t>(1, bytes));
  return std::min(groups, fit > num_sms ? fit - fit % num_sms : fit);
}

inline constexpr int kMergeWarpsPerQuery = 4, kMaxMergeWarps = 16;

// Shared memory for merging: one array of words per query and two for all; as many words as all keys need, 32 keys per
// word, or as many as fit.
constexpr int merge_arrays(int queries) { return queries + 2; }
constexpr int merge_words(int queries, int seq_kv) {
  constexpr int kBytes = 32 * 1024;
  return std::min(kBytes / 4 / merge_arrays(queries), (seq_kv + 31) / 32);
}

}  // namespace dsa::indexer_bwd
