// The work of a persistent CTA: an equal run of the units of all items, found on the device.
#pragma once

#include <cstdint>

namespace dsa::indexer_logits {

// `units` units, from unit `skip` of item `item` on.
struct Run {
  int64_t units;
  int item, skip;
};

template <int kThreads>
struct RunStorage {
  int64_t warp_units[kThreads / 32];
  Run run;
};

// Finds this CTA's run of items that have units_of(item) units each. Called by all threads.
template <int kThreads, class UnitsOf>
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
  if (threadIdx.x == 0) shared.run.units = 0;
  __syncthreads();
  int64_t all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += shared.warp_units[w];
    all += shared.warp_units[w];
  }
  const int64_t run_begin = all * blockIdx.x / gridDim.x, run_end = all * (blockIdx.x + 1) / gridDim.x;
  if (run_begin < run_end && before <= run_begin && run_begin < before + mine) {
    int item = first;
    for (int units; before + (units = units_of(item)) <= run_begin; ++item) before += units;
    shared.run = {run_end - run_begin, item, static_cast<int>(run_begin - before)};
  }
  __syncthreads();
}

}  // namespace dsa::indexer_logits
