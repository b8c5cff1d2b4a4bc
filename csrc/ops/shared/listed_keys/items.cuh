// What CTAs walk over: queries, and in the last round pieces of them.
#pragma once

#include <type_traits>

#include "config.h"
#include "ops/shared/merged_lists/params.h"
#include "params.h"
#include "tiles/gather.cuh"

namespace dsa::listed_keys {

using namespace dsa::tiles;

struct KernelParams : Params {
  Rounds rounds;
};
// For the queries of a launch whose lists are not merged.
struct UnmergedParams : KernelParams {
  merged_lists::Lists lists;
};
template <Config kC>
using ParamsOf = std::conditional_t<kC.unmerged, UnmergedParams, KernelParams>;

// The heads of one query and group, with all tiles or a piece of them.
struct Item {
  int group, s, b;
  int slots;  // leading slots in use
  VisibleIds ids;
  int first, tiles;  // at least one tile, perhaps without a visible key, perhaps the same as of the next piece
  int first_unused;  // slots from here on are behind the last tile; of the last piece

  __device__ __forceinline__ Item(const KernelParams& p, int index) {
    int piece = 0, pieces = 1;
    if (const int later = index - p.rounds.whole; later >= 0) {
      pieces = p.rounds.pieces;
      piece = later % pieces, index = p.rounds.whole + later / pieces;
    }
    group = index % p.groups;
    index /= p.groups;
    s = index % p.seq_q;
    b = index / p.seq_q;
    slots = used_slots(p, b, s);
    ids = visible_ids(p, b, s);
    const int all_tiles = ids.any() && slots > 0 ? (slots + kTileKeys - 1) / kTileKeys : 1;
    first = 0, tiles = all_tiles;
    if (pieces > 1) {
      const int share = all_tiles / pieces, more = all_tiles % pieces;
      first = min(share * piece + min(piece, more), all_tiles - 1);
      tiles = max(1, share + (piece < more));
    }
    first_unused = piece == pieces - 1 ? all_tiles * kTileKeys : p.topk;
  }
  // The result row of head block `block`.
  __device__ __forceinline__ float* row(const Params& p, int block) const {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.seq_q * p.groups;
    return p.sums + (block * rows + (static_cast<int64_t>(b) * p.seq_q + s) * p.groups + group) * p.topk;
  }
};

// The items of a kernel, in the order in which they are walked over. What item `index` is, is loaded ahead of it.
template <Config kC>
struct Items;

template <Config kC>
  requires(!kC.unmerged)
struct Items<kC> {
  const KernelParams& p;

  __device__ __forceinline__ int count() const { return p.rounds.items(p.batch * p.seq_q * p.groups); }
  __device__ __forceinline__ int load(int index) const { return index; }
};
template <Config kC>
  requires(kC.unmerged)
struct Items<kC> {
  const int listed;
  const int* g_first;

  __device__ __forceinline__ explicit Items(const UnmergedParams& p)
      : listed(__ldg(p.lists.item_counts + 1)), g_first(p.lists.items + __ldg(p.lists.item_counts)) {}
  __device__ __forceinline__ int count() const { return listed; }
  __device__ __forceinline__ int load(int index) const { return index < listed ? __ldg(g_first + index) : 0; }
};
__device__ __forceinline__ int rows_of_item(const Params& p) {
  return p.per_head_block ? (p.heads / p.groups + kBlockHeads - 1) / kBlockHeads : 1;
}

// A gathering thread's slots of an item.
struct Slots {
  const int* g_ids;
  int left;

  __device__ __forceinline__ Slots(const Params& p, const Item& item, int first_tile, int thread)
      : g_ids(p.indices + item.b * p.indices_stride_b + item.s * p.indices_stride_s + item.group * p.indices_stride_g +
              (item.first + first_tile) * kTileKeys + gather_row(thread)),
        left(item.slots - (item.first + first_tile) * kTileKeys - gather_row(thread)) {}

  // The ids of a tile. The next are those of the tile kStep further.
  template <int kStep>
  __device__ __forceinline__ void load(int (&ids)[kGatherRowsPerThread]) {
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      ids[i] = i * kGatherRowStep < left ? __ldg(g_ids + i * kGatherRowStep) : -1;
    }
    g_ids += kStep * kTileKeys;
    left -= kStep * kTileKeys;
  }
};

}  // namespace dsa::listed_keys
