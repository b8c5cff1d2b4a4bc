// The sequences of a call: what their queries see, and which of their tiles a CTA takes.
#pragma once

#include <climits>
#include <cstdint>

#include "config.h"
#include "ops/indexer/indexer_logits/runs.cuh"
#include "params.h"

namespace dsa::indexer_logits_paged {

// Tiles of a sequence that a CTA takes. Written by the query warp.
struct alignas(16) Sequence {
  int index;
  int first_tile, end_tile;  // end_tile is -1 if the run has ended
};

// Consecutive keys, those that a query sees.
struct alignas(8) KeyRun {
  int begin, count;  // count: -1 if there is no such query

  __device__ __forceinline__ bool contains(int key) const {
    return static_cast<unsigned>(key - begin) < static_cast<unsigned>(count);
  }
};

// How many keys a query sees.
__device__ __forceinline__ int length_of(const Params& p, int sequence, int query) {
  const int length = max(0, p.context_lens[sequence * p.lens_stride_b + query * p.lens_stride_n]);
  return min(max(0, p.length_per_query ? length : length - p.queries + 1 + query), p.max_keys);
}

__device__ __forceinline__ KeyRun seen_by(const Params& p, int sequence, int query) {
  const int begin = p.starts == nullptr ? 0 : max(0, p.starts[query * p.starts_stride]);
  return {begin, max(0, length_of(p, sequence, query) - begin)};
}

// The tiles that hold the keys which any query of a sequence sees, and the end of these keys.
struct Extent {
  int keys_end, first_tile, tiles;

  // Work is counted in units: one for the start of a sequence, and one per tile.
  __device__ __forceinline__ int units() const { return tiles > 0 ? 1 + tiles : 0; }
};

// Tiles of one page.
__device__ __forceinline__ int page_tiles(const Params& p) { return (p.page + kTileKeys - 1) / kTileKeys; }

__device__ __forceinline__ Extent extent_of(const Params& p, int sequence) {
  int begin = INT_MAX, end = 0;
#pragma unroll 1
  for (int query = p.length_per_query ? 0 : p.queries - 1; query < p.queries; ++query) {
    const KeyRun seen = seen_by(p, sequence, query);
    if (seen.count > 0) begin = min(begin, seen.begin), end = max(end, seen.begin + seen.count);
  }
  const int first_tile = end > 0 ? begin / kTileKeys : 0;  // with several pages, `begin` is 0
  const int end_tile = end / p.page * page_tiles(p) + (end % p.page + kTileKeys - 1) / kTileKeys;
  return {end, first_tile, end_tile - first_tile};
}

// Calls `visit(sequence)` for each sequence of which a CTA's run has tiles.
template <class Visit>
__device__ __forceinline__ void walk(const indexer_logits::Run& run, const Params& p, Visit visit) {
  int skip = run.skip;
  int64_t left = run.units;
  for (int index = run.item; left > 0 && index < p.batch; ++index, skip = 0) {
    const Extent extent = extent_of(p, index);
    const int end = static_cast<int>(min(int64_t{extent.units()}, skip + left));
    left -= end - skip;
    const int first = max(skip - 1, 0);
    if (first < end - 1) visit(Sequence{index, extent.first_tile + first, extent.first_tile + end - 1});
  }
}

}  // namespace dsa::indexer_logits_paged
