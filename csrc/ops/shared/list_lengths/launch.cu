// Finds the ends of lists, behind which all is padding.
#include "ops/shared/list_lengths/params.h"
#include "sm90/launch.h"
#include "sm90/programmatic.cuh"
#include "tiles/visibility.cuh"

namespace dsa::list_lengths {
namespace {

using listed_keys::Problem;

constexpr int kThreads = 256, kLanes = 32;

// One warp per query. Most lists have no padding, so the last 32 ids are loaded first, then 256 at a time.
__global__ void __launch_bounds__(kThreads)
    list_lengths_kernel(const __grid_constant__ Problem p, int* __restrict__ g_lengths) {
  constexpr int kSteps = 8;
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();
  const int query = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (query >= p.batch * p.seq_q) return;
  const int b = query / p.seq_q, s = query % p.seq_q;
  const tiles::VisibleIds visible = tiles::visible_ids(p, b, s);
  int length = 0;
  for (int group = 0; visible.any() && group < p.groups; ++group) {
    const int* g_ids = p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
    const auto length_to = [&](int end) {
      const int slot = end - 1 - lane;
      return slot >= 0 && visible.has(__ldg(g_ids + slot)) ? slot + 1 : 0;
    };
    length = __reduce_max_sync(~0u, max(length, length_to(p.topk)));
    for (int end = p.topk - kLanes; length < end; end -= kSteps * kLanes) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) length = max(length, length_to(end - i * kLanes));
      length = __reduce_max_sync(~0u, length);
    }
  }
  if (lane == 0) g_lengths[query] = length;
}

}  // namespace

const char* launch(const Problem& p, int* lengths, void* stream) {
  const int64_t threads = int64_t{p.batch} * p.seq_q * kLanes;
  const sm90::Grid grid(unsigned((threads + kThreads - 1) / kThreads), 1, /*programmatic=*/true);
  return sm90::launch_kernel<list_lengths_kernel>(p.device, grid, kThreads, 0, static_cast<cudaStream_t>(stream), p,
                                                  lengths);
}

}  // namespace dsa::list_lengths
