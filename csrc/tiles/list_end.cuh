// The end of a list, behind which all is padding.
#pragma once

#include "sm90/registers.cuh"
#include "visibility.cuh"

namespace dsa::tiles {

// The slots of a list up to its last visible id, of `slots`. Most lists have no padding, so the last ids are looked at
// first. Called by whole warps.
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

// Where more CTAs share a list, each would look for its end for as long as its part takes.
inline constexpr int kMostLookingParts = 8;

}  // namespace dsa::tiles
