// Sizes of the kernels of the indexer's gradients.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_bwd {

inline constexpr int kRows = 128;  // of Q, each a head of a query, that are computed together
inline constexpr int kTileKeys = 64, kChunkColumns = 64;

constexpr int queries_of_group(int heads) { return kRows / heads; }

inline constexpr int kRowWarpgroups = 2, kWarpgroupRows = kRows / kRowWarpgroups;
inline constexpr int kGroups = 2, kDerivatives = 3;  // in shared memory at a time: Q of groups; w D of tiles
// Tiles of keys there.
constexpr int tiles_in_flight(int columns) { return columns == 128 ? 4 : 8; }

inline constexpr int kThreads = (kRowWarpgroups + 2) * 128, kStartRegisters = 65536 / kThreads;
// Of a thread, by role.
struct Registers {
  int rows, keys, gather;
};
constexpr Registers registers_of(int columns) {
  return columns == 128 ? Registers{168, 112, 64} : Registers{152, 128, 80};
}

// Where a query's gradient for an entry stands, of a group: queries in each tile, keys in each query.
constexpr int64_t gradient_place(int64_t entry, int query, int queries) {
  return (entry / kTileKeys * queries + query) * kTileKeys + entry % kTileKeys;
}

// Groups of one launch, whose entries, of `bytes` a group, take at most `room`, but for a single group that takes more;
// and where there are many, they fill waves of CTAs.
constexpr int64_t groups_at_once(int64_t groups, int64_t bytes, int64_t room, int num_sms) {
  const int64_t fit = std::max<int64_t>(1, room / std::max<int64_t>(1, bytes));
  return std::min(groups, fit > num_sms ? fit - fit % num_sms : fit);
}

inline constexpr int kMergeWarpsOfQuery = 4, kMaxMergeWarps = 16;

// Shared memory for merging: arrays of words, one a query and two for all; as many words as keys need, 32 a word, or as
// there is room for.
constexpr int merge_arrays(int queries) { return queries + 2; }
constexpr int merge_words(int queries, int seq_kv) {
  constexpr int kBytes = 32 * 1024;
  return std::min(kBytes / 4 / merge_arrays(queries), (seq_kv + 31) / 32);
}

}  // namespace dsa::indexer_bwd
