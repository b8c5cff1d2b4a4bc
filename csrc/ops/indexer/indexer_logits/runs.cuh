// The work of persistent CTAs, shared out on the device: each has an equal run of the units of all items. A rest of the
// units may be kept back for those that are done first.
#pragma once

#include <cstdint>

#include "tickets.h"

namespace dsa::indexer_logits {

// `units` units, from unit `skip` of item `item` on.
struct Run {
  int64_t units;
  int item, skip;
};

template <int kThreads>
struct RunStorage {
  int64_t warp_units[kThreads / 32];
  Run run;   // of this CTA
  Run rest;  // for all CTAs
};

// Finds this CTA's run of items that have units_of(item) units each, and the rest if any is kept back. Called by all
// threads.
template <bool kKeepsRest, int kThreads, class UnitsOf>
__device__ __forceinline__ void find_run(RunStorage<kThreads>& shared, int items, UnitsOf units_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int thread_items = (items + kThreads - 1) / kThreads;
  const int first = min(items, static_cast<int>(threadIdx.x) * thread_items);
  const int end = min(items, first + thread_items);
  int64_t mine = 0;
  for (int item = first; item < end; ++item) mine += units_of(item);
  int64_t before = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int64_t other = __shfl_up_sync(~0u, before, lanes);
    if (lane >= lanes) before += other;
  }
  if (lane == 31) shared.warp_units[warp] = before;
  before -= mine;
  if (threadIdx.x == 0) shared.run.units = shared.rest.units = 0;
  __syncthreads();
  int64_t all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += shared.warp_units[w];
    all += shared.warp_units[w];
  }
  const auto find = [&](Run& run, int64_t run_begin, int64_t run_end) {
    if (run_begin >= run_end || run_begin < before || run_begin >= before + mine) return;
    int item = first;
    int64_t item_begin = before;
    for (int units; item_begin + (units = units_of(item)) <= run_begin; ++item) item_begin += units;
    run = {run_end - run_begin, item, static_cast<int>(run_begin - item_begin)};
  };
  const int64_t shared_out = all - (kKeepsRest ? rest_of(all, items, gridDim.x) : 0);
  find(shared.run, shared_out * blockIdx.x / gridDim.x, shared_out * (blockIdx.x + 1) / gridDim.x);
  find(shared.rest, shared_out, all);
  __syncthreads();
}

}  // namespace dsa::indexer_logits
