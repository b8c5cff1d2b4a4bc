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

// The most entries of a run's merged list, if it may have `percent` of the tiles of the run's lists.
constexpr int64_t entries_of_run(int queries, int topk, int seq_kv, int percent) {
  return std::min(queries * tiles_of_list(topk) * percent / 100, tiles_of_list(seq_kv)) * kTileKeys;
}
// In the forward pass and attn_dist: a tile of 64 rows takes up to 1.6 times as long as one of 16 columns.
inline constexpr int kMostForwardPercent = 60;

// An entry is a key id, and a bit for each query of the run that lists the key.
inline constexpr int kIdBits = 24;
inline constexpr unsigned kIdMask = (1u << kIdBits) - 1;
static_assert(kIdBits + kMaxQueries == 32);

// Whether to look for lists to merge. If none are merged, looking costs up to 2 % of a backward pass of this many
// slots.
constexpr bool are_merged(int heads, int64_t groups, int64_t batch, int64_t seq_q, int64_t topk, int64_t seq_kv) {
  constexpr int64_t kFewestSlots = 1 << 18, kFewestSlotsPerKey = 16;
  const int64_t slots = batch * seq_q * groups * topk, keys = batch * seq_kv * groups;
  const int group_heads = static_cast<int>(heads / groups);
  return group_heads >= 1 && group_heads <= kMaxGroupHeads && seq_q >= queries_of_run(group_heads) && seq_kv > 0 &&
         seq_kv < kIdMask && slots >= std::max(kFewestSlots, kFewestSlotsPerKey * keys);
}

// The same for the forward pass and attn_dist, which otherwise take the heads of one query as 16 columns, and compute
// for 64 rows if lists are merged: with fewer queries, each SM would have few runs, and with fewer slots, in all or for
// each key, looking would take longer than it saves (measured).
constexpr bool are_merged_forward(int heads, int64_t groups, int64_t batch, int64_t seq_q, int64_t topk, int64_t seq_kv,
                                  int num_sms) {
  constexpr int64_t kFewestQueries = 24, kFewestSlots = 1 << 21, kFewestSlotsPerKey = 64;
  const int64_t queries = batch * seq_q, slots = queries * topk, keys = batch * seq_kv;
  return groups == 1 && (heads == 8 || heads == 16) && queries >= kFewestQueries * num_sms && slots >= kFewestSlots &&
         slots >= kFewestSlotsPerKey * keys && are_merged(heads, groups, batch, seq_q, topk, seq_kv);
}

// The words of a run in the workspace: entries, items, and the number of entries.
constexpr int64_t words_of_run(int64_t entries, int queries) { return entries + queries + 1; }

// Runs per launch: their part of the workspace is at most kRunBytes.
inline constexpr int64_t kRunBytes = int64_t{256} << 20;

constexpr int64_t runs_at_once(int64_t runs, int64_t words_of_run) {
  return std::min(runs, std::max<int64_t>(1, kRunBytes / 4 / words_of_run));
}

}  // namespace dsa::merged_lists
