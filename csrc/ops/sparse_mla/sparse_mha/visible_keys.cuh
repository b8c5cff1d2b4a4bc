// Which keys are visible to a query.
#pragma once

#include "ops/sparse_mla/sparse_mha/mask.h"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mha {

// What query `s` of sequence `b` sees.
__device__ __forceinline__ tiles::VisibleIds visible_keys(const Lists& p, int b, int s) {
  tiles::VisibleIds ids = tiles::visible_ids(p, b, s);
  const int64_t first = p.q_start + s + 1 - p.window;
  if (first > ids.begin) ids.begin = first < ids.end ? static_cast<int>(first) : ids.end;
  return ids;
}

}  // namespace dsa::sparse_mha
