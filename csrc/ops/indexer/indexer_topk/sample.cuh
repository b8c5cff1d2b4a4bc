// The sample of the keys, and the bar for each query that follows from the sample's logits.
#pragma once

#include "ops/indexer/topk_select/selector.cuh"
#include "params.h"
#include "plan.h"

namespace dsa::indexer_topk {

using topk_select::key_of, topk_select::kPiece, topk_select::leave_undefined, topk_select::Selection,
    topk_select::Selector, topk_select::SelectorStorage, topk_select::threshold_of;

// The keys that query `query` sees: [x, y), and x >= y if there are none.
__device__ __forceinline__ int2 window_of(const Params& p, int query) {
  return {max(0, p.starts[query * p.starts_stride]), min(p.keys, p.ends[query * p.ends_stride])};
}

// The number of sampled keys before a key, and the key of a sampled one.
__device__ __forceinline__ int sampled_before(const Params& p, int key) {
  const int period = p.lists.period;
  return min(p.sampled, max(0, key) / period * kSampledPart + min(max(0, key) % period, kSampledPart));
}
__device__ __forceinline__ int key_of_sampled(const Params& p, int i) {
  return i / kSampledPart * p.lists.period + i % kSampledPart;
}

// One thread for each query and for each sampled key.
__global__ void sample_bounds_kernel(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.queries) {
    const int2 window = window_of(p, i);
    p.sample_starts[i] = sampled_before(p, window.x);
    p.sample_ends[i] = sampled_before(p, window.y);
  }
  if (p.k_scale != nullptr && i < p.sampled) p.sample_scale[i] = p.k_scale[key_of_sampled(p, i)];
}

// How many entries of a query's sample should exceed its bar. Between topk and the capacity of a list there is room for
// the sample's error, which is large where neighboring keys resemble each other: as much above as below, in proportion;
// but at least six standard deviations of independent keys.
__device__ __forceinline__ unsigned bar_rank(const Params& p, int sampled, int keys) {
  const float topk = static_cast<float>(p.topk);
  const float expected = topk * static_cast<float>(sampled) / static_cast<float>(keys);
  const float proportion = sqrtf(static_cast<float>(p.lists.capacity) / topk);
  return static_cast<unsigned>(fmaxf(expected * proportion, expected + 6 * sqrtf(expected) + 3));
}

struct BarShape : topk_select::HeldShape {
  static_assert(kHeld >= kMaxSampled);
};
struct BarStorage : SelectorStorage<BarShape> {
  int listed;
};

// A CTA takes a query: chooses its bar, lists the sample's candidates, and clears counts for the lists of the others.
__global__ void __launch_bounds__(BarShape::kThreads, BarShape::kCtasPerSm)
    sample_bars_kernel(const __grid_constant__ Params p) {
  constexpr int kThreads = BarShape::kThreads, kKeys = BarShape::kKeys;
  __shared__ BarStorage shared;
  const int query = blockIdx.x, thread = threadIdx.x;
  const int64_t counts = int64_t{p.visits} * p.lists.block_queries;
  for (int64_t i = query + int64_t{thread} * p.queries; i < counts; i += int64_t{kThreads} * p.queries) {
    p.lists.counts[i] = 0;
  }
  const int begin = p.sample_starts[query], end = p.sample_ends[query];
  const int2 window = window_of(p, query);
  const float* g_row = p.sample + int64_t{query} * p.sampled;

  // Pieces of four entries, kThreads of them side by side.
  const int first = begin / kPiece * kPiece,
            pieces = (max(begin, end) - first + kThreads * kPiece - 1) / (kThreads * kPiece);
  const auto column_of = [&](int i) { return first + (i / kPiece * kThreads + thread) * kPiece + i % kPiece; };
  unsigned keys[kKeys];
#pragma unroll
  for (unsigned& key : keys) leave_undefined(key);
#pragma unroll
  for (int i = 0; i < kKeys; i += kPiece) {
    if (i / kPiece >= pieces) break;
    const int column = column_of(i);
    const topk_select::Piece piece = topk_select::load_piece(g_row + min(column, p.sampled - kPiece));
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      keys[i + j] = column + j >= begin && column + j < end ? key_of(piece.values[j]) : 0;
    }
  }
  Selector<BarStorage>::clear(shared.histograms[0]);
  if (thread == 0) shared.listed = 0;
  __syncthreads();
  // If a list has room for all keys, they all are candidates.
  unsigned last_out = 0;
  if (window.y - window.x > p.lists.capacity && pieces > 0) {
    const unsigned rank = bar_rank(p, end - begin, window.y - window.x);
    Selector<BarStorage> selector{shared};
    last_out = selector.find(keys, pieces, rank, 1, Selector<BarStorage>::kWhole, rank / 16).threshold;
  }
  if (thread == 0) p.bars[query] = threshold_of(last_out);
  Candidate* g_list = p.sample_candidates + int64_t{query} * kSampleList;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (i / kPiece >= pieces) break;
    if (keys[i] <= last_out) continue;
    const int place = atomicAdd(&shared.listed, 1), column = column_of(i);
    if (place < kSampleList) g_list[place] = {g_row[column], key_of_sampled(p, column)};
  }
  __syncthreads();
  if (thread == 0) p.sample_counts[query] = shared.listed;
}

}  // namespace dsa::indexer_topk
