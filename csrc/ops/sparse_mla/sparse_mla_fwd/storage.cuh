// Shared memory of the sparse MLA forward kernels, and their work items.
#pragma once

#include <cutlass/fast_math.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "config.h"
#include "ops/shared/merged_lists/params.h"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/online_softmax.cuh"

namespace dsa::sparse_mla_fwd {

using namespace dsa::tiles;

// Of a tile, chunks 0..3 (the front half) hold the front values and chunks 4..7 the back values; chunk 8 holds the key
// columns that are no values (the tail), later P.
inline constexpr int kFrontChunks = 4, kBackChunks = 5, kLastChunk = 8;
static_assert(kTileRows == kBlockK && kGatherRows == kBlockK, "a tile is what one wgmma scores and one gather copies");
inline constexpr int kStepColumns = 16;                                       // K of one wgmma
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads

// Where Q stays during an item. Wide: what the score warpgroup's registers do not hold, the tail and the last 16 value
// columns. Narrow: all of Q, in chunks of 64 columns.
template <Config kC, bool kTail = (tail_columns(kC) > 0), bool kNarrow = is_narrow(kC)>
struct SharedQ {
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};
template <Config kC>
struct SharedQ<kC, true, false> {
  alignas(1024) Bf16 tail[kC.heads * tail_columns(kC)];
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};
template <Config kC, bool kTail>
struct SharedQ<kC, kTail, true> {
  alignas(1024) Bf16 chunks[kC.d_qk * kC.heads];
  float columns[kWarpsPerWarpgroup][kC.heads];  // one value per head and warp
};

// The stages of tiles. If both halves have equally many stages, they are adjacent, so that a tile is contiguous.
template <Config kC>
struct SharedTiles {
  static constexpr bool kWhole = kC.front_stages == kC.back_stages;
  static constexpr int kFrontStride = (kFrontChunks + (kWhole ? kBackChunks : 0)) * kChunkElements;
  static constexpr int kBackStride = (kBackChunks + (kWhole ? kFrontChunks : 0)) * kChunkElements;
  static constexpr int kFirstBack = kFrontChunks * (kWhole ? 1 : kC.front_stages) * kChunkElements;

  alignas(1024) Bf16 elements[(kC.front_stages * kFrontChunks + kC.back_stages * kBackChunks) * kChunkElements];

  // Chunk `chunk` of a tile; `slot` is that of the half that contains it.
  __device__ __forceinline__ Bf16* chunk(int slot, int chunk) {
    return chunk < kFrontChunks ? elements + slot * kFrontStride + chunk * kChunkElements
                                : elements + kFirstBack + slot * kBackStride + (chunk - kFrontChunks) * kChunkElements;
  }
};

// If lists are merged: the kernel's items, and the entries of the score warpgroup's item.
struct ListedItems {
  int first_item, items;
  const int* g_entries;
  int entries;
};
struct NoItems {};

template <Config kC>
struct SharedStorage {
  SharedTiles<kC> tiles;
  SharedQ<kC> q;
  uint32_t visible[kC.front_stages][kWarpsPerWarpgroup];  // see publish_visible
  uint8_t rescale[kC.back_stages][kC.heads];              // of O before the tile is added: exponent bits
  float finish[2][kC.heads];                              // factor of O after the last tile, double-buffered by item
  int item_tiles[2][kC.front_stages];                     // arrives with Q; by parity and slot of the front ring
  uint64_t full_front[kC.front_stages], full_back[kC.back_stages];
  uint64_t probs_written[kC.back_stages], probs_turn[kC.back_stages], probs_read[kC.back_stages];
  uint64_t finished[2];
  std::conditional_t<kC.is_merged, ListedItems, NoItems> listed;
};

// Values derived from Params once, on the host.
struct KernelParams : Params {
  KernelParams(const Params& params, const Maxima& maxima);

  int64_t rows;                                                            // batch * seq_q * heads
  int items;                                                               // (query, split, group, block of heads)
  cutlass::FastDivmod head_blocks, group_count, split_count, query_count;  // to decode an item's index
  float scale_log2;  // |sm_scale| * log2(e); above zero so that masked scores stay -inf
  bool negate_q;     // sm_scale is negative
  Maxima maxima;
};

inline KernelParams::KernelParams(const Params& params, const Maxima& maxima)
    : Params(params),
      rows(int64_t(batch) * seq_q * heads),
      head_blocks(ceil_div(heads / groups, kBlockHeads)),
      group_count(groups),
      split_count(splits),
      query_count(seq_q),
      scale_log2(std::fmax(std::fabs(sm_scale) * kLog2E, std::numeric_limits<float>::denorm_min())),
      negate_q(sm_scale < 0),
      maxima(maxima) {
  items = batch * seq_q * groups * splits * head_blocks;
}

// What the instances for keys in pages take.
struct PagedParams : KernelParams {
  PagedParams(const Params& params, const Pages& pages, float empty_lse)
      : KernelParams(params, {nullptr, nullptr, empty_lse}), pages(pages), page_slots(pages.page) {}

  Pages pages;
  cutlass::FastDivmod page_slots;
};

// What the instances take that share a call: for runs of queries whose lists are merged, and for the other queries.
struct MergedParams : KernelParams {
  MergedParams(const Params& params, const merged_lists::Lists& lists)
      : KernelParams(params, {nullptr, nullptr, 0.f}),
        lists(lists),
        run_count(int(merged_lists::runs_of_sequence(seq_q, lists.queries))) {}

  merged_lists::Lists lists;
  int run_count;  // of a sequence
};

// One work item; the same for all threads.
struct Item {
  int head_block, group, s, b, split;
  int first_tile, tiles;  // at least one tile, perhaps without a visible key
  int slot_end;           // slots below this are in use
  VisibleIds ids;

  __device__ __forceinline__ Item() {}
  __device__ __forceinline__ Item(const KernelParams& p, int index) {
    p.head_blocks(index, head_block, index);
    p.group_count(index, group, index);
    p.split_count(index, split, index);
    p.query_count(b, s, index);
    const int slots = used_slots(p, b, s);
    const int all_tiles = ceil_div(slots, kBlockK);
    first_tile = p.split_count.div(split * all_tiles);
    const int end_tile = p.split_count.div((split + 1) * all_tiles);
    tiles = end_tile > first_tile ? end_tile - first_tile : 1;
    slot_end = end_tile * kBlockK < slots ? end_tile * kBlockK : slots;
    ids = visible_ids(p, b, s);
  }

  __device__ __forceinline__ const int* indices(const KernelParams& p) const {
    return p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
  }
  // The head of a row of the item.
  __device__ __forceinline__ int head_of(const KernelParams& p, int row) const {
    return group * (p.heads / p.groups) + head_block * kBlockHeads + row;
  }
  // Row of [batch, seq_q, heads] of this item's first head.
  __device__ __forceinline__ int64_t first_row(const KernelParams& p) const {
    return (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + group * (p.heads / p.groups) + head_block * kBlockHeads;
  }
  __device__ __forceinline__ int heads_left(const KernelParams& p) const {
    return p.heads / p.groups - head_block * kBlockHeads;
  }
};

// A run of queries, whose heads are the rows of a tile, with the entries of a merged list instead of ids.
struct MergedItem : Item {
  const int* g_entries;
  int rows;

  // `index`: in lists.items
  __device__ __forceinline__ MergedItem(const MergedParams& p, int index) {
    p.query_count(b, s, ~__ldg(p.lists.items + index));
    const int run = b * p.run_count + (s >> __ffs(p.lists.queries) - 1) - p.lists.first_run;
    g_entries = reinterpret_cast<const int*>(p.lists.entries) + static_cast<int64_t>(run) * p.lists.capacity;
    rows = min(p.lists.queries, p.seq_q - s) * p.heads;
    head_block = group = split = first_tile = 0;
    slot_end = __ldg(p.lists.counts + run);
    tiles = max(1, ceil_div(slot_end, kBlockK));
    ids = {0, p.seq_kv};
  }

  __device__ __forceinline__ int head_of(const KernelParams& p, int row) const { return row & p.heads - 1; }
  __device__ __forceinline__ const int* indices(const KernelParams&) const { return g_entries; }
  __device__ __forceinline__ int heads_left(const KernelParams&) const { return rows; }
};

// A query of a run whose lists are not merged.
struct OtherItem : Item {
  __device__ __forceinline__ OtherItem(const MergedParams& p, int index) : Item(p, __ldg(p.lists.items + index)) {}
};

template <Config kC>
using ItemOf = std::conditional_t<!kC.is_merged, Item, std::conditional_t<is_narrow(kC), OtherItem, MergedItem>>;

// The items of the kernel, and one of them.
template <Config kC>
__device__ __forceinline__ int items_of(const SharedStorage<kC>& shared, const KernelParams& p) {
  if constexpr (kC.is_merged) {
    return shared.listed.items;
  } else {
    return p.items;
  }
}
template <Config kC>
__device__ __forceinline__ ItemOf<kC> item_at(const SharedStorage<kC>& shared, const KernelParams& p, int index) {
  if constexpr (kC.is_merged) {
    return {static_cast<const MergedParams&>(p), shared.listed.first_item + index};
  } else {
    return {p, index};
  }
}

}  // namespace dsa::sparse_mla_fwd
