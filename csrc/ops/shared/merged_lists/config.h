// Runs of neighboring queries whose lists are merged: their size, and when to merge. No torch, no CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::merged_lists {

inline constexpr int kTileKeys = 64, kTileRows = 64;
inline constexpr int kMaxGroupHeads = 32, kMaxQueries = 8;

// With few heads, the rows of a tile are several queries with this many rows each.
constexpr int rows_of_query(int group_heads) { return group_heads <= 8 ? 8 : group_heads <= 16 ? 16 : 32; }
constexpr int queries_of_run(int group_heads) { return kTileRows / rows_of_query(group_heads); }
constexpr int64_t runs_of_sequence(int64_t seq_q, int queries) { return (seq_q + queries - 1) / queries; }
constexpr int64_t runs_of_call(int64_t batch, int64_t seq_q, int64_t groups, int queries) {
  return batch * runs_of_sequence(seq_q, queries) * groups;
}

// Tiles of a list of `slots` slots; a query without keys is an item with one tile.
constexpr int64_t tiles_of_list(int64_t slots) { return std::max<int64_t>(1, (slots + kTileKeys - 1) / kTileKeys); }

// The most tiles of a merged list that are worth merging lists of `tiles` tiles for: a merged tile costs up to 10 %
// more than one of a single query (measured).
constexpr int64_t most_merged_tiles(int64_t tiles) { return tiles * 17 / 20; }

// The most entries of a run's merged list.
constexpr int64_t entries_of_run(int queries, int topk) {
  return most_merged_tiles(queries * tiles_of_list(topk)) * kTileKeys;
}

// An entry is a key id, and a bit for each query of the run that lists the key.
inline constexpr int kIdBits = 24;
inline constexpr unsigned kIdMask = (1u << kIdBits) - 1;
static_assert(kIdBits + kMaxQueries == 32);

// Whether to look for lists to merge. If none are merged, looking costs up to 2 % of a call of this many slots; it
// reads all keys once.
constexpr bool are_merged(int group_heads, int64_t batch, int64_t seq_q, int64_t groups, int64_t topk, int64_t seq_kv) {
  constexpr int64_t kFewestSlots = 1 << 18, kFewestSlotsPerKey = 16;
  const int64_t slots = batch * seq_q * groups * topk, keys = batch * seq_kv * groups;
  return group_heads >= 1 && group_heads <= kMaxGroupHeads && seq_q >= queries_of_run(group_heads) &&
         seq_kv < kIdMask && slots >= std::max(kFewestSlots, kFewestSlotsPerKey * keys);
}

// Runs per launch: their entries take at most kEntryBytes.
inline constexpr int64_t kEntryBytes = int64_t{256} << 20;

constexpr int64_t runs_at_once(int64_t runs, int64_t entries_of_run) {
  return std::min(runs, std::max<int64_t>(1, kEntryBytes / 4 / std::max<int64_t>(1, entries_of_run)));
}

}  // namespace dsa::merged_lists
