// The work of persistent CTAs, shared out on the device: each has an equal run of the units of all items. A rest of the
// units may be kept back for those that are done first.
#pragma once

#include <cutlass/fast_math.h>

#include "sm90/warpgroup.cuh"
#include "tickets.h"

namespace dsa::indexer_logits {

using sm90::kWarpThreads, sm90::sum_to_lane, sm90::sync_threads;

inline constexpr int kRunBarrier = 1;  // 0 is __syncthreads

// `units` units, from unit `skip` of item `item` on.
struct Run {
  int units, item, skip;
};

// For kThreads threads that find runs together.
template <int kThreads>
struct RunStorage {
  static constexpr int kWarps = kThreads / kWarpThreads;
  alignas(16) int warp_units[kWarps];
  Run run;   // of this CTA
  Run rest;  // for all CTAs
};

// Finds this CTA's run of items that have units_of(item) units each, and the rest if any is kept back. All units are
// fewer than 2^31: indexer_logits checks it, and calls for a selection are smaller. `ctas` divides by the number of
// CTAs. Called by kThreads threads, which then synchronize with all that read the runs.
template <bool kKeepsRest, int kThreads, class UnitsOf>
__device__ __forceinline__ void find_run(RunStorage<kThreads>& shared, int items, const cutlass::FastDivmod& ctas,
                                         int thread, UnitsOf units_of) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, cta = static_cast<int>(blockIdx.x);
  const int thread_items = (items + kThreads - 1) / kThreads;
  const int first = min(items, thread * thread_items), end = min(items, first + thread_items);
  int mine = 0;
  for (int item = first; item < end; ++item) mine += units_of(item);
  int before = static_cast<int>(sum_to_lane(mine)) - mine;
  if (lane == kWarpThreads - 1) shared.warp_units[warp] = before + mine;
  if (thread == 0) shared.run.units = shared.rest.units = 0;
  sync_threads<kRunBarrier, kThreads>();
  int all = 0;
#pragma unroll
  for (int w = 0; w < shared.kWarps; ++w) {
    before += w < warp ? shared.warp_units[w] : 0;
    all += shared.warp_units[w];
  }
  const auto write_if_mine = [&](Run& run, int run_begin, int units) {
    int skip = run_begin - before;
    if (units == 0 || skip < 0 || skip >= mine) return;
    int item = first;
    if (thread_items > 1) {
      for (int size; (size = units_of(item)) <= skip && item + 1 < end; ++item) skip -= size;
    }
    run = {units, item, skip};
  };
  const int rest = kKeepsRest ? static_cast<int>(rest_of(all, items, gridDim.x)) : 0, shared_out = all - rest;
  if constexpr (kKeepsRest) write_if_mine(shared.rest, shared_out, rest);
  const int share = ctas.div(shared_out), over = shared_out - share * ctas.divisor;
  const auto run_begin = [&](int cta) { return share * cta + ctas.div(over * cta); };  // shared_out * cta / ctas
  write_if_mine(shared.run, run_begin(cta), run_begin(cta + 1) - run_begin(cta));
}

}  // namespace dsa::indexer_logits
