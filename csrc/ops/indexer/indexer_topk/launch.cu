// The kernels of indexer_topk around those that score and select.
#include "ops/indexer/indexer_logits/above.cuh"
#include "params.h"
#include "plan.h"
#include "select.cuh"
#include "sm90/launch.h"
#include "sm90/programmatic.cuh"

namespace dsa::indexer_topk {
namespace {

constexpr int kThreads = 256, kCopyBytes = 16;

// A thread copies 16 bytes of a key, or splits the bounds of a query.
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ SplitParams p) {
  const int row_copies = p.row_bytes / kCopyBytes;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, copies = int64_t{p.seq_kv} * row_copies;
  sm90::wait_for_preceding_kernel();
  if (thread < copies) {
    const int key = static_cast<int>(thread / row_copies), offset = static_cast<int>(thread % row_copies) * kCopyBytes;
    const bool in_sample = key % kSampleEvery == 0;
    const Keys& keys = in_sample ? p.sample : p.others;
    const int place = in_sample ? key / kSampleEvery : key - sampled(key);
    *reinterpret_cast<uint4*>(keys.k + int64_t{place} * p.row_bytes + offset) =
        *reinterpret_cast<const uint4*>(p.k + key * p.k_stride + offset);
    if (offset == 0 && p.k_scale != nullptr) keys.k_scale[place] = p.k_scale[key];
  } else if (thread - copies < p.seq) {
    const int query = static_cast<int>(thread - copies);
    const int start = min(p.seq_kv, max(0, p.starts[query * p.starts_stride]));
    const int end = max(start, min(p.seq_kv, p.ends[query * p.ends_stride]));
    p.sample.starts[query] = sampled(start);
    p.sample.ends[query] = sampled(end);
    p.others.starts[query] = start - sampled(start);
    p.others.ends[query] = end - sampled(end);
  }
}

// A warp takes a row.
__global__ void __launch_bounds__(kThreads) bars_kernel(const __grid_constant__ BarParams p) {
  constexpr int kLaneEntries = (rank_of_bar(kMaxTopk) + 31) / 32;
  const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();
  if (row >= p.rows) return;
  float values[kLaneEntries], bar = INFINITY;
  int indices[kLaneEntries];
#pragma unroll
  for (int i = 0; i < kLaneEntries; ++i) {
    const int place = i * 32 + lane;
    const bool exists = place < p.rank;
    values[i] = exists ? p.values[int64_t{row} * p.rank + place] : NAN;
    indices[i] = exists ? p.indices[int64_t{row} * p.rank + place] : 0;
    bar = fminf(bar, values[i]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) bar = fminf(bar, __shfl_xor_sync(~0u, bar, lanes));
  Candidate* candidates = p.above.candidates + int64_t{row} * p.above.max;
  unsigned count = 0;
#pragma unroll
  for (int i = 0; i < kLaneEntries; ++i) {
    const bool is_above = values[i] > bar;
    const unsigned lanes = __ballot_sync(~0u, is_above);
    if (is_above) {
      candidates[count + indexer_logits::lanes_before(lanes)] = {values[i], key_of_sample(indices[i])};
    }
    count += __popc(lanes);
  }
  if (lane == 0) {
    p.bars[row] = bar;
    p.above.counts[row] = count;
    if (row == 0) *p.any_left = 0, *p.above.tickets = 0;
  }
}

unsigned ctas_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

template <class Shape, int kTopk, int kKeys>
const char* launch_select_of(const SelectParams& p, void* stream) {
  const sm90::Grid grid(unsigned(p.results.rows), 1, /*programmatic=*/true);
  return sm90::launch_kernel<select_candidates_kernel<Shape, kTopk, kKeys>>(p.results.device, grid, Shape::kThreads,
                                                                            sizeof(SelectStorage<Shape, kTopk, kKeys>),
                                                                            static_cast<cudaStream_t>(stream), p);
}

}  // namespace

const char* launch_split(const SplitParams& p, void* stream) {
  const int64_t threads = int64_t{p.seq_kv} * (p.row_bytes / kCopyBytes) + p.seq;
  return sm90::launch_kernel<split_kernel>(p.device, sm90::Grid(ctas_for(threads), 1, /*programmatic=*/true), kThreads,
                                           0, static_cast<cudaStream_t>(stream), p);
}

const char* launch_bars(const BarParams& p, void* stream) {
  const sm90::Grid grid(ctas_for(int64_t{p.rows} * 32), 1, /*programmatic=*/true);
  return sm90::launch_kernel<bars_kernel>(p.device, grid, kThreads, 0, static_cast<cudaStream_t>(stream), p);
}

const char* launch_select(const SelectParams& p, void* stream) {
  if (p.results.columns > kMaxKeysOfSmall) return launch_select_of<LargeShape, kMaxTopk, kMaxKeys>(p, stream);
  return p.results.topk <= kSmallTopk ? launch_select_of<SmallShape, kSmallTopk, kMaxKeysOfSmall>(p, stream)
                                      : launch_select_of<LargeShape, kMaxTopk, kMaxKeysOfSmall>(p, stream);
}

}  // namespace dsa::indexer_topk
