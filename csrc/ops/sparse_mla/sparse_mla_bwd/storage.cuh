// Shared memory of the sparse MLA backward kernel, and a CTA's work item.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "config.h"
#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/scatter.cuh"

namespace dsa::sparse_mla_bwd {

using namespace dsa::tiles;

// The front warpgroup gathers and accumulates chunks 0..3 of 64 columns and the tail, chunk 8; the back one 4..7.
inline constexpr int kHalfChunks = 4, kValueChunks = 8, kTailChunk = 8;
static_assert(kTileRows == kBlockK && kGatherRows == kBlockK, "a tile is what one wgmma scores and one gather copies");
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads

// Pointers to an item's rows in global memory.
struct ItemPlace {
  const int* g_ids;
  const char* g_keys;
  float* g_sums;  // of key 0; unused in a deterministic call
  Bf16* g_rows;   // of slot 0
  int slots;      // in use
  VisibleIds ids;
  int tiles;         // at least one, perhaps without a visible key
  int first_tile;    // tile to start with; the tiles wrap around
  HeadTile heads;    // of Q, dO and dQ
  float* g_dq_part;  // dQ of a part of a split item; null for a whole item
};

inline constexpr int kIdSlots = 4;
inline constexpr int kOnes = 64;  // 8 x 8, what one wgmma descriptor repeats

// With merged lists.
struct MergedRows {
  bool is_run;  // or a single query
  // Which keys of a tile each query lists, a bit per key; double-buffered by tile. The last row, of rows that belong to
  // no query, is zero.
  uint32_t listed[2][merged_lists::kMaxQueries + 1][2];
};

template <Config kC>
struct SharedStorage {
  alignas(1024) Bf16 q[kBlockHeads * kC.d_qk];
  alignas(1024) Bf16 dout[kBlockHeads * kC.d_v];
  alignas(1024) Bf16 keys[kBlockK * kC.d_qk];  // at the end, dQ
  alignas(1024) Bf16 probs[kBlockHeads * kBlockK];
  alignas(1024) Bf16 dscores[kBlockHeads * kBlockK];
  // The ids of a tile's keys, -1 for none; one copy per gradient warpgroup. Warpgroups that still add up tile j read
  // them while others are at tile j + 1, and those of tile j + 2 are loaded early.
  int ids[2][kIdSlots][kBlockK];
  ItemPlace place;
  uint32_t visible[2][4];  // double-buffered by tile, see publish_visible
  uint64_t inputs_full, front_full, back_full, probs_written, probs_read;
  MergedRows merged;
  alignas(128) Bf16 ones[kOnes];  // only used by instances that write sums of P

  static __device__ __forceinline__ Bf16* chunk(Bf16* first, int chunk) { return first + chunk * kChunkElements; }
};

// The tensor maps of an item of one query. References to a kernel's parameters: parameters in a struct change the code.
struct Maps {
  const CUtensorMap &q, &dout, &dq;

  template <Config kC>
  __device__ __forceinline__ const Maps& of_item(const SharedStorage<kC>&) const {
    return *this;
  }
};

// Of items of one query, and of runs.
struct MergedMaps {
  struct {
    CUtensorMap q, dout, dq;
  } kinds[2];

  template <Config kC>
  __device__ __forceinline__ const auto& of_item(const SharedStorage<kC>& shared) const {
    return kinds[shared.merged.is_run];
  }
};
template <Config kC>
using MapsOf = std::conditional_t<kC.merged, MergedMaps, Maps>;

// A CTA's share of the items: the first `whole` items are one CTA each, the others `split_parts`.
struct Share {
  int item, part = 0, parts = 1;
  int64_t dq_part = -1;  // index in dq_parts; -1 for a whole item

  __device__ __forceinline__ Share(int block, int whole, int split_parts) : item(block) {
    if (block >= whole) {
      dq_part = block - whole;
      parts = split_parts;
      part = static_cast<int>(dq_part) % parts;
      item = whole + static_cast<int>(dq_part) / parts;
    }
  }
};

// A share's part of a list of `all_slots` slots.
struct SlotRange {
  int first, slots, tiles;  // tiles >= 1

  __device__ __forceinline__ SlotRange(int all_slots, VisibleIds ids, const Share& share) {
    const int all_tiles = ids.any() ? (all_slots + kBlockK - 1) / kBlockK : 0;
    const int first_tile = all_tiles * share.part / share.parts, end_tile = all_tiles * (share.part + 1) / share.parts;
    first = first_tile * kBlockK;
    slots = min(end_tile * kBlockK, all_slots) - first;
    tiles = max(1, end_tile - first_tile);
  }
};

// A block of at most 64 heads of a query's group, over all of its keys or a part of them.
struct Item {
  int head_block, group, s, b;
  VisibleIds ids;
  int first_slot, slots, tiles;  // of this part; tiles >= 1
  int64_t dq_part;
  int64_t first_row_of_dkv;  // of first_slot, among the rows of dkv
  int64_t first_dscores;     // of first_slot, among the tiles of dS of pairs

  __device__ __forceinline__ Item(const Params& p, int block) : Item(p, Share(block, p.whole_items, p.parts), 0) {}
  // A CTA of a pair.
  static __device__ __forceinline__ Item of_pair(const Params& p, int pair, int rank) {
    return Item(p, Share(pair, p.whole_items, p.parts), rank);
  }
  static __device__ __forceinline__ Item of_query(const Params& p, int index, int block) {
    return Item(p, Share(index, index + 1, 1), block);
  }

  __device__ __forceinline__ Item(const Params& p, const Share& share, int block) : head_block(block) {
    dq_part = share.dq_part;
    first_row_of_dkv = int64_t{share.item} * p.topk;
    int index = share.item + p.first_item;
    group = index % p.groups;
    index /= p.groups;
    s = index % p.seq_q;
    b = index / p.seq_q;
    ids = visible_ids(p, b, s);
    const SlotRange range(used_slots(p, b, s), ids, share);
    first_slot = range.first, slots = range.slots, tiles = range.tiles;
    first_row_of_dkv += first_slot;
    first_dscores = int64_t{share.item} * ((p.topk + kBlockK - 1) / kBlockK) + first_slot / kBlockK;
  }

  __device__ __forceinline__ ItemPlace place(const Params& p) const {
    const int64_t first_key = static_cast<int64_t>(b) * p.seq_kv * p.groups + group;
    return {p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g + first_slot,
            reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + b * p.kv_stride_b + group * p.kv_stride_g),
            p.dkv.sums + first_key * p.d_qk,
            static_cast<Bf16*>(p.dkv.rows) + first_row_of_dkv * p.d_qk,
            slots,
            ids,
            tiles,
            p.spread ? s % tiles : 0,
            {0, head_block * kBlockHeads, group, s, b},
            dq_part < 0 ? nullptr : p.dq_parts + dq_part * kBlockHeads * p.d_qk};
  }
  // Of a row of the tile: whether it exists, its head, and its row of [batch, seq_q, heads].
  __device__ __forceinline__ bool has(const Params& p, int row) const { return row < heads_left(p); }
  __device__ __forceinline__ int head(const Params& p, int row) const {
    return group * (p.heads / p.groups) + head_block * kBlockHeads + row;
  }
  __device__ __forceinline__ int64_t row(const Params& p, int row) const {
    return (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + head(p, 0) + row;
  }
  __device__ __forceinline__ int heads_left(const Params& p) const {
    return p.heads / p.groups - head_block * kBlockHeads;
  }
  // Where the sums of P over its heads belong, of first_slot.
  __device__ __forceinline__ float* dist(const Params& p) const {
    const int64_t query = (int64_t{head_block} * p.batch + b) * p.seq_q + s;
    return p.dist + (query * p.groups + group) * p.topk + first_slot;
  }
};

}  // namespace dsa::sparse_mla_bwd
