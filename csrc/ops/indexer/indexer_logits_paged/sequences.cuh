// The sequences of a call: what their queries see, and which of their tiles a CTA takes.
#pragma once

#include <cutlass/fast_math.h>

#include <climits>
#include <cstdint>

#include "config.h"
#include "params.h"
#include "sm90/warpgroup.cuh"

namespace dsa::indexer_logits_paged {

using sm90::kWarpgroupThreads, sm90::kWarpsPerWarpgroup, sm90::kWarpThreads, sm90::sum_to_lane, sm90::sync_warpgroup;

inline constexpr int kRunBarrier = 1;  // 0 is __syncthreads

// Params, and divisions by numbers of theirs that the host has prepared.
struct KernelParams : Params {
  explicit KernelParams(const Params& params) : Params(params), page_keys(page), ctas(num_sms) {}

  cutlass::FastDivmod page_keys, ctas;
};

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
__device__ __forceinline__ int length_of(const KernelParams& p, int sequence, int query) {
  const int length = max(0, p.context_lens[sequence * p.lens_stride_b + query * p.lens_stride_n]);
  return min(max(0, p.length_per_query ? length : length - p.queries + 1 + query), p.max_keys);
}

__device__ __forceinline__ KeyRun seen_by(const KernelParams& p, int sequence, int query) {
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
__device__ __forceinline__ int page_tiles(const KernelParams& p) { return (p.page + kTileKeys - 1) / kTileKeys; }

__device__ __forceinline__ Extent extent_of(const KernelParams& p, int sequence) {
  int begin = INT_MAX, end = 0;
#pragma unroll 1
  for (int query = p.length_per_query ? 0 : p.queries - 1; query < p.queries; ++query) {
    const KeyRun seen = seen_by(p, sequence, query);
    if (seen.count > 0) begin = min(begin, seen.begin), end = max(end, seen.begin + seen.count);
  }
  const int first_tile = end > 0 ? begin / kTileKeys : 0;  // with several pages, `begin` is 0
  const int page = p.page_keys.div(end), in_page = end - page * p.page;
  const int end_tile = page * page_tiles(p) + (in_page + kTileKeys - 1) / kTileKeys;
  return {end, first_tile, end_tile - first_tile};
}

// What a CTA takes: `units` units, from unit `skip` of a sequence on. All units are fewer than 2^31:
// indexer_logits_paged checks it, and calls for a selection have one sequence or logits that fit in their workspace.
struct Run {
  int sequence, skip, units;
  Extent extent;  // of the sequence
};

struct RunStorage {
  alignas(16) int warp_units[kWarpsPerWarpgroup];
  Run run;
};

// Finds this CTA's run, an equal share of all units. Called by the threads of the warpgroup that loads; the others need
// not wait for it.
__device__ __forceinline__ Run find_run(RunStorage& shared, const KernelParams& p, int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, cta = static_cast<int>(blockIdx.x);
  const int thread_sequences = (p.batch + kWarpgroupThreads - 1) / kWarpgroupThreads;
  const int first = min(p.batch, thread * thread_sequences), end = min(p.batch, first + thread_sequences);
  Extent extent{};
  int mine = 0;
  for (int i = first; i < end; ++i) extent = extent_of(p, i), mine += extent.units();
  int before = static_cast<int>(sum_to_lane(mine)) - mine;
  if (lane == kWarpThreads - 1) shared.warp_units[warp] = before + mine;
  sync_warpgroup<kRunBarrier>();
  int all = 0;
#pragma unroll
  for (int w = 0; w < kWarpsPerWarpgroup; ++w) {
    before += w < warp ? shared.warp_units[w] : 0;
    all += shared.warp_units[w];
  }
  const int share = p.ctas.div(all), longer = all - share * p.ctas.divisor;
  const int units = share + (cta < longer);  // the first runs are one longer
  int skip = share * cta + min(cta, longer) - before;
  if (thread == 0) shared.run.units = units;
  if (units > 0 && skip >= 0 && skip < mine) {  // the run begins in one of this thread's sequences
    int sequence = first;
    if (thread_sequences > 1) {
      for (extent = extent_of(p, sequence); skip >= extent.units() && sequence + 1 < end;
           extent = extent_of(p, sequence)) {
        skip -= extent.units();
        ++sequence;
      }
    }
    shared.run.sequence = sequence, shared.run.skip = skip, shared.run.extent = extent;
  }
  sync_warpgroup<kRunBarrier>();
  return shared.run;
}

// Calls `visit(sequence)` for each sequence of which a run has tiles.
template <class Visit>
__device__ __forceinline__ void walk(const Run& run, const KernelParams& p, Visit visit) {
  Extent extent = run.extent;
  int index = run.sequence, skip = run.skip, left = run.units;
  while (left > 0) {
    const int end = min(extent.units(), skip + left), first = max(skip - 1, 0);
    left -= end - skip;
    if (first < end - 1) visit(Sequence{index, extent.first_tile + first, extent.first_tile + end - 1});
    skip = 0;
    if (left == 0 || ++index == p.batch) return;
    extent = extent_of(p, index);
  }
}

}  // namespace dsa::indexer_logits_paged
