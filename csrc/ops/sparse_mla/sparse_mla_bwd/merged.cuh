// Items of several queries with few heads, whose lists are merged. A tile's 64 rows are then the heads of each query of
// a run, one query after the other; each entry of the list says which of them list its key.
#pragma once

#include <type_traits>

#include "ops/shared/merged_lists/config.h"
#include "storage.cuh"

namespace dsa::sparse_mla_bwd {

// How the items of a launch are divided among CTAs.
template <bool kMerged>
struct ItemPlan {
  int whole, split, parts;  // one CTA for each whole item, `parts` for each split one

  __device__ __forceinline__ explicit ItemPlan(const Params& p) {
    if constexpr (kMerged) {
      const int items = p.lists.item_counts[0] + p.lists.item_counts[1];
      const Plan plan = plan_items(items, p.topk, p.num_sms);
      whole = static_cast<int>(plan.whole), split = items - whole, parts = plan.parts;
    } else {
      whole = p.whole_items, split = 0, parts = p.parts;
    }
  }
  __device__ __forceinline__ int ctas() const { return whole + split * parts; }
};

// A run of queries whose lists are merged, or one query; over all keys or a part of them.
struct MergedItem {
  bool is_run;
  int queries, row_bits;  // the query of a row is its number without these low bits
  int group, s, b;        // of the first query
  const int* g_ids;       // entries of a run
  VisibleIds ids;
  int first_slot, slots, tiles;  // of this part; tiles >= 1
  int64_t dq_part;

  __device__ __forceinline__ MergedItem(const Params& p, int block) {
    const ItemPlan<true> plan(p);
    const Share share(block, plan.whole, plan.parts);
    dq_part = share.dq_part;
    const int listed = p.lists.items[share.item];
    is_run = listed < 0;
    int index = is_run ? ~listed : listed;
    group = index % p.groups;
    index /= p.groups;
    s = index % p.seq_q;
    b = index / p.seq_q;
    int all_slots;
    if (is_run) {
      const int runs = static_cast<int>(merged_lists::runs_of_sequence(p.seq_q, p.lists.queries));
      const int run = (b * runs + s / p.lists.queries) * p.groups + group - p.lists.first_run;
      queries = min(p.lists.queries, p.seq_q - s);
      row_bits = __ffs(kBlockHeads / p.lists.queries) - 1;
      g_ids = reinterpret_cast<const int*>(p.lists.entries) + static_cast<int64_t>(run) * p.lists.capacity;
      ids = {0, p.seq_kv};
      all_slots = p.lists.counts[run];
    } else {
      queries = 1;
      row_bits = __ffs(kBlockHeads) - 1;
      g_ids = p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
      ids = visible_ids(p, b, s);
      all_slots = used_slots(p, b, s);
    }
    const SlotRange range(all_slots, ids, share);
    first_slot = range.first, slots = range.slots, tiles = range.tiles;
  }

  __device__ __forceinline__ ItemPlace place(const Params& p) const {
    const int64_t first_key = static_cast<int64_t>(b) * p.seq_kv * p.groups + group;
    return {g_ids + first_slot,
            reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + b * p.kv_stride_b + group * p.kv_stride_g),
            p.dkv.sums + first_key * p.d_qk,
            nullptr,
            slots,
            ids,
            tiles,
            p.spread ? s % tiles : 0,
            {0, 0, group, s, b},
            dq_part < 0 ? nullptr : p.dq_parts + dq_part * kBlockHeads * p.d_qk};
  }
  __device__ __forceinline__ MergedRows merged_rows() const { return {is_run, {}}; }
  // Of a row of the tile: whether it exists, its head, and its row of [batch, seq_q, heads].
  __device__ __forceinline__ bool has(const Params& p, int row) const {
    return query(row) < queries && head_of_group(row) < p.heads / p.groups;
  }
  __device__ __forceinline__ int head(const Params& p, int row) const {
    return group * (p.heads / p.groups) + head_of_group(row);
  }
  __device__ __forceinline__ int64_t row(const Params& p, int row) const {
    return (static_cast<int64_t>(b) * p.seq_q + s + query(row)) * p.heads + head(p, row);
  }
  // The index, in MergedRows, of the keys that a row's query lists.
  __device__ __forceinline__ int listed_row(const Params& p, int row) const {
    return has(p, row) ? query(row) : merged_lists::kMaxQueries;
  }

 private:
  __device__ __forceinline__ int query(int row) const { return row >> row_bits; }
  __device__ __forceinline__ int head_of_group(int row) const { return row - (query(row) << row_bits); }
};

template <bool kMerged>
using ItemType = std::conditional_t<kMerged, MergedItem, Item>;
template <Config kC>
using ItemOf = ItemType<kC.merged>;

// An id of a list, or an entry of a merged one.
struct Entry {
  int id;            // -1 if it is not visible
  unsigned queries;  // a bit for each query that lists it

  template <Config kC>
  __device__ __forceinline__ Entry(const SharedStorage<kC>& shared, int listed) : id(listed), queries(1) {
    if (shared.merged.is_run) {
      id = listed & merged_lists::kIdMask;
      queries = static_cast<unsigned>(listed) >> merged_lists::kIdBits;
    }
    if (!shared.place.ids.has(id)) id = -1, queries = 0;
  }
};

// Writes which keys of a tile each query lists. One thread per key, in whole warps.
__device__ __forceinline__ void publish_queries(uint32_t (&listed)[merged_lists::kMaxQueries + 1][2], unsigned queries,
                                                int key) {
  const int lane = recomputed(key) % kWarpThreads;
  uint32_t of_lane = 0;
#pragma unroll
  for (int query = 0; query < merged_lists::kMaxQueries; ++query) {
    const uint32_t keys = __ballot_sync(~0u, queries >> query & 1);
    of_lane = lane == query ? keys : of_lane;
  }
  if (lane < merged_lists::kMaxQueries) listed[lane][key / kWarpThreads] = of_lane;
}

// Clears P and dS where a row's query does not list the key. `listed_rows`: of the lane's two rows.
template <class Scores>
__device__ __forceinline__ void mask_others(const uint32_t (&listed)[merged_lists::kMaxQueries + 1][2],
                                            const int (&listed_rows)[2], int lane, Scores& r_s, Scores& r_dp) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of the keys
    uint32_t keys[2];                     // bit 8 c + i: column 8 c + i of the lane's columns
#pragma unroll
    for (int r = 0; r < 2; ++r) keys[r] = listed[listed_rows[r]][half] >> lane % 4 * 2;
#pragma unroll
    for (int i = half * 16; i < half * 16 + 16; ++i) {
      if (!(keys[i / 2 % 2] >> (i / 4 % 4 * 8 + i % 2) & 1)) r_s(i) = r_dp(i) = 0.f;
    }
  }
}

}  // namespace dsa::sparse_mla_bwd
