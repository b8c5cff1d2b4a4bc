// Runs of neighboring queries: what each has, shared memory, and the entries of merged lists.
#pragma once

#include "ops/shared/listed_keys/items.cuh"
#include "ops/shared/merged_lists/params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"

namespace dsa::attn_dist {

using namespace dsa::tiles;

inline constexpr int kTilesAhead = 4;  // whose entries are loaded

// One shape of the kernel. A run has 4 queries of 16 heads or 8 of 8.
struct RunConfig {
  int columns, queries;

  constexpr int rows_of_query() const { return kTileRows / queries; }
  constexpr int chunks() const { return columns / kChunkColumns; }
  constexpr int part_chunks() const { return columns == 576 ? 3 : 2; }
  constexpr int parts() const { return chunks() / part_chunks(); }  // of a tile, with a stage each
  constexpr int part_steps() const { return part_chunks() * kChunkColumns / 16; }
  constexpr int tiles() const { return 225 * 1024 / (chunks() * kChunkBytes); }  // in the ring
  // A tile's lists are written when its first part has a stage. By then the score warpgroup that read the lists of
  // tiles() + 2 tiles before has begun to release its next tile, so that these loads have returned.
  constexpr int listed_slots() const { return tiles() + 2; }
  // When the entries of a tile t + kTilesAhead are loaded, tile t - 1 has all stages but its last. The tile that had
  // them before, t - 1 - tiles(), has been listed then, for which all warps have read its entries.
  constexpr int entry_slots() const { return kTilesAhead + tiles() + 1; }
};

inline constexpr int kScoreWarpgroups = 2, kRunThreads = 384;

// Of each query and half of a tile's 64 entries: which of them the query lists, and how many of its keys come before.
// As the keys of a list ascend, that is the slot of the first one.
struct ListedHalf {
  uint32_t entries;
  int slot;
};
using ListedTile = ListedHalf[merged_lists::kMaxQueries][2];

template <RunConfig kC>
struct RunStorage {
  static_assert(kC.parts() >= 2, "see entry_slots");
  alignas(1024) Bf16 keys[kC.tiles()][kC.chunks() * kChunkElements];
  alignas(16) uint32_t entries[kC.entry_slots()][kTileRows];
  ListedTile listed[kC.listed_slots()];
  uint64_t entries_full[kC.entry_slots()];
  uint64_t full[kC.tiles()][kC.parts()], empty[kC.tiles()][kC.parts()];
  uint64_t listed_full[kC.listed_slots()];
};

struct RunParams : listed_keys::Params {
  merged_lists::Lists lists;
  int run_count;  // of a sequence
};

struct RunItem {
  int s, b, queries;  // from query s on
  const int* g_entries;
  int entries, tiles;  // at least one tile

  __device__ __forceinline__ RunItem(const RunParams& p, int listed) {
    const int first_query = ~listed;
    s = first_query % p.seq_q;
    b = first_query / p.seq_q;
    const int run = b * p.run_count + s / p.lists.queries - p.lists.first_run;
    queries = min(p.lists.queries, p.seq_q - s);
    g_entries = reinterpret_cast<const int*>(p.lists.entries) + static_cast<int64_t>(run) * p.lists.capacity;
    entries = __ldg(p.lists.counts + run);
    tiles = max(1, (entries + kTileRows - 1) / kTileRows);
  }
  __device__ __forceinline__ float* row(const RunParams& p, int query) const {
    return p.sums + (static_cast<int64_t>(b) * p.seq_q + s + query) * p.topk;
  }
};

// The merged runs of a launch.
struct Runs {
  int count;
  const int* g_items;

  __device__ __forceinline__ explicit Runs(const RunParams& p)
      : count(__ldg(p.lists.item_counts)), g_items(p.lists.items) {}
  // For RunItem; behind the last run that of the last.
  __device__ __forceinline__ int load(int index) const { return __ldg(g_items + min(index, count - 1)); }
};

// Writes which query lists what, tile by tile. Each warp of the gathering warpgroup has two queries of 8, or one of 4.
template <int kQueries>
struct RunLists {
  static constexpr int kOwn = kQueries / kWarpsPerWarpgroup;
  int slots[kOwn] = {};  // before the next tile

  // `left`: entries of the run from this tile on. Called by all lanes.
  __device__ __forceinline__ void publish(ListedTile& listed, const uint32_t (&s_entries)[kTileRows], int left,
                                          int thread) {
    const int lane = thread % kWarpThreads, first = thread / kWarpThreads * kOwn;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * kWarpThreads + lane;
      const uint32_t entry = row < left ? s_entries[row] : 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t entries = __ballot_sync(~0u, entry >> (merged_lists::kIdBits + first + i) & 1);
        if (lane == 0) listed[first + i][half] = {entries, slots[i]};
        slots[i] += __popc(entries);
      }
    }
  }
  // Clears the slots behind a query's keys.
  __device__ __forceinline__ void finish(const RunParams& p, const RunItem& item, int thread) {
    const int lane = thread % kWarpThreads, first = thread / kWarpThreads * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      for (int slot = slots[i] + lane; first + i < item.queries && slot < p.topk; slot += kWarpThreads) {
        item.row(p, first + i)[slot] = 0.f;
      }
      slots[i] = 0;
    }
  }
};

// The entries of tiles in shared memory.
template <RunConfig kC>
struct TileEntries {
  RunStorage<kC>& shared;
  const int thread;
  Ring<kC.entry_slots()> ring;       // the tile at hand
  Ring<kC.entry_slots()> next_ring;  // the next tile to load
  int loaded = 0;                    // tiles of the item and of the next one

  // Loads up to kTilesAhead tiles behind `tile`, as far as the item and the next have any.
  __device__ __forceinline__ void load_ahead(const RunItem& item, const RunItem& next, int next_tiles, int tile) {
#pragma unroll 1
    for (; loaded < min(tile + 1 + kTilesAhead, item.tiles + next_tiles); ++loaded, next_ring.advance()) {
      if (thread != 0) continue;
      const int* g_entries = loaded < item.tiles ? item.g_entries + loaded * kTileRows
                                                 : next.g_entries + (loaded - item.tiles) * kTileRows;
      uint64_t* const full = &shared.entries_full[next_ring.slot];
      arrive_and_expect(full, sizeof(shared.entries[0]));
      bulk_load(shared.entries[next_ring.slot], g_entries, sizeof(shared.entries[0]), full);
    }
  }
  // The tile's rows of keys, once its entries have arrived. Rows behind the last entry are copies of key 0, and no
  // query lists them: products with one row do not depend on others.
  __device__ __forceinline__ GatherRows rows(const char* g_keys, uint32_t row_bytes, int left) const {
    wait(&shared.entries_full[ring.slot], ring.parity);
    int ids[kGatherRowsPerThread];
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      const int row = gather_row(thread) + i * kGatherRowStep;
      ids[i] = row < left ? shared.entries[ring.slot][row] & merged_lists::kIdMask : 0;
    }
    return {g_keys, row_bytes, ids, {0, merged_lists::kIdMask + 1}};
  }
};

}  // namespace dsa::attn_dist
