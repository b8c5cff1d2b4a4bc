// Shared memory of the indexer_logits_paged kernel, and what its warps know of the work.
#pragma once

#include <cutlass/cutlass.h>

#include "config.h"
#include "ops/indexer/indexer_logits/heads.cuh"
#include "ops/indexer/indexer_logits/runs.cuh"
#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::indexer_logits_paged {

using namespace dsa::sm90;
using indexer_logits::kIsFp8;

// What the feeding warp says about a tile.
struct alignas(16) Tile {
  int sequence;   // -1: the end of the CTA's work
  int ordinal;    // of the sequence among those of the CTA; one that returns counts again
  int first_key;  // in the sequence
  int keys;       // at most kTileKeys; negative if their block does not exist, so that nothing has been loaded
};

template <class Element, Config kC>
struct SharedStorage {
  alignas(1024) Element q[kC.q_slots()][kC.max_passes()][kC.pass_bytes() / sizeof(Element)];
  alignas(1024) Element keys[kC.stages()][kC.tile_bytes() / sizeof(Element)];
  alignas(16) float scales[kIsFp8<Element> ? kC.stages() : 1][kTileKeys];
  // For each 16 rows of Q, four words for each lane of a quad, as sum_heads takes them.
  alignas(16) float weights[kC.q_slots()][kC.max_rows()];
  Tile tiles[kC.stages()];
  int lengths[kC.q_slots()][kMaxQueries];
  indexer_logits::RunStorage<kThreads> plan;  // items are sequences
  int64_t units;                              // of all sequences
  indexer_logits::Run pieces[kPieceSlots];    // that the CTA takes after its run; the last one has no units
  alignas(8) uint64_t q_full[kC.q_slots()], q_empty[kC.q_slots()], tile_full[kC.stages()], tile_empty[kC.stages()];
  uint64_t piece_full[kPieceSlots], piece_empty[kPieceSlots];
};

// How many keys a query sees.
__device__ __forceinline__ int length_of(const Params& p, int sequence, int query) {
  const int length = max(0, p.context_lens[sequence * p.lens_stride_b + query * p.lens_stride_n]);
  return min(max(0, p.length_per_query ? length : length - p.queries + 1 + query), p.max_keys);
}

// How many keys the queries of a sequence see, and the tiles of these.
struct Extent {
  int keys, tiles;

  // Work is counted in units: one for the start of a sequence, and one per tile.
  __device__ __forceinline__ int units() const { return tiles > 0 ? 1 + tiles : 0; }
};

// Tiles of one page.
__device__ __forceinline__ int page_tiles(const Params& p) { return (p.page + kTileKeys - 1) / kTileKeys; }

__device__ __forceinline__ Extent extent_of(const Params& p, int sequence) {
  int keys = length_of(p, sequence, p.queries - 1);
  for (int query = 0; p.length_per_query && query < p.queries - 1; ++query) {
    keys = max(keys, length_of(p, sequence, query));
  }
  return {keys, keys / p.page * page_tiles(p) + (keys % p.page + kTileKeys - 1) / kTileKeys};
}

// The block that holds tile `tile` of a sequence, or -1.
__device__ __forceinline__ int block_of(const Params& p, int sequence, int tile) {
  const int block = p.block_table[sequence * p.table_stride_b + tile / page_tiles(p) * p.table_stride_page];
  return block < p.blocks ? max(block, -1) : -1;
}

// How many of `units` the equal runs of all CTAs have; the others are taken in pieces.
__device__ __forceinline__ int64_t units_of_runs(const Params& p, int64_t units) {
  return p.taken == nullptr ? units : units - units / kPieceShare;
}

// Calls `visit(sequence, ordinal, first, end)` for tiles [first, end) of each sequence in a run. `ordinal` counts them.
template <class Visit>
__device__ __forceinline__ void walk(const indexer_logits::Run& run, const Params& p, int& ordinal, Visit visit) {
  int skip = run.skip;
  int64_t left = run.units;
  for (int sequence = run.item; left > 0 && sequence < p.batch; ++sequence, skip = 0) {
    const int units = extent_of(p, sequence).units(), end = static_cast<int>(min(int64_t{units}, skip + left));
    left -= end - skip;
    const int first = max(skip - 1, 0);
    if (first < end - 1) visit(sequence, ordinal++, first, end - 1);
  }
}

// Passes over the rows of Q of a sequence.
template <Config kC>
__device__ __forceinline__ int passes_of(const Params& p) {
  return kC.max_passes() == 1 ? 1 : (p.queries * kC.heads + kC.pass_rows - 1) / kC.pass_rows;
}

}  // namespace dsa::indexer_logits_paged
