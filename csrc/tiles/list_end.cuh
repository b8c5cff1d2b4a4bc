// The search for the end of a list, behind which all is padding.
#pragma once

#include "list_end.h"
#include "sm90/registers.cuh"
#include "visibility.cuh"

namespace dsa::tiles {

// The slots up to the last one, of the first `slots`, whose id is visible; 0 if none is. Most lists have no padding, so
// the last 32 ids are loaded first, then 256 at a time. Called by all lanes of a warp.
__device__ __forceinline__ int slots_to_last_key(const int* g_ids, int slots, VisibleIds visible) {
  constexpr int kLanes = 32, kSteps = 8;
  const int lane = sm90::thread_index() % kLanes;
  const auto look = [&](int end) {
    const int slot = end - 1 - lane;
    return slot >= 0 && visible.has(__ldg(g_ids + slot)) ? slot + 1 : 0;
  };
  int used = __reduce_max_sync(~0u, look(slots));
#pragma unroll 1
  for (int end = slots - kLanes; used == 0 && end > 0; end -= kSteps * kLanes) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) used = max(used, look(end - i * kLanes));
    used = __reduce_max_sync(~0u, used);
  }
  return used;
}

}  // namespace dsa::tiles
