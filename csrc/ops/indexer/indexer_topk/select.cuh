// Exact top-k of each query's candidates, in id order.
//
// A CTA takes a query and holds its candidates' radix keys in registers:
//
//   find    the last key that is selected, as topk_select does; of equal ones at the end those with the lowest ids
//   order   a bit for each selected id; a candidate's place is the number of bits before its own
//
// All keys above the bar are candidates, so at least topk of them contain the topk best. A query with fewer candidates,
// or with more than there is room for, is left to topk_select.
#pragma once

#include "ops/indexer/topk_select/config.h"
#include "sample.cuh"

namespace dsa::indexer_topk {

struct SelectShape : topk_select::HeldShape {
  static_assert(kHeld >= kMaxCandidates);
};

inline constexpr int kMaxLists = 256;    // of a query; more than there are SMs
inline constexpr int kIdBits = 1 << 17;  // that are set and counted at a time
inline constexpr int kWordBits = 64, kIdWords = kIdBits / kWordBits;

struct SelectStorage : SelectorStorage<SelectShape> {
  uint16_t before[kIdWords];  // the number of bits before each word
  alignas(16) float values[topk_select::kMaxTopk];
  alignas(16) int ids[topk_select::kMaxTopk];
  int list_ends[kMaxLists];  // in the sequence of all candidates
  int candidates, first_visit;
  bool fits;
  unsigned warp_lowest[SelectShape::kWarps], warp_highest[SelectShape::kWarps];

  // The bits are where the histograms were.
  __device__ __forceinline__ uint64_t* id_words() { return reinterpret_cast<uint64_t*>(this->histograms); }
};
static_assert(sizeof(SelectStorage::histograms) >= kIdWords * sizeof(uint64_t));

// The lists of this CTA's query, one after the other: that of the sample, and one for each CTA that visited its block.
// Nothing is kept in registers, which the keys need.
struct QueryLists {
  const Params& p;
  const SelectStorage& shared;

  __device__ __forceinline__ Candidate operator[](int i) const {
    const int query = blockIdx.x;
    if (i < shared.list_ends[0]) return p.sample_candidates[int64_t{query} * kSampleList + i];
    int list = 1;
#pragma unroll 1
    while (i >= shared.list_ends[list]) ++list;
    const int block_queries = p.lists.block_queries, visit = shared.first_visit + list - 1;
    const int of_visits = visit * block_queries + query % block_queries;
    return p.lists.candidates[int64_t{of_visits} * p.lists.capacity + i - shared.list_ends[list - 1]];
  }
};

// Finds a query's lists and adds up their lengths. Run by one warp.
__device__ __forceinline__ void measure_lists(const Params& p, SelectStorage& shared, int query) {
  const int lane = threadIdx.x % 32, block_queries = p.lists.block_queries, block = query / block_queries;
  const int2 window = window_of(p, query);
  int first_visit = 0, lists = 0;
  if (window.x < window.y) {
    const int* ctas = p.lists.block_ctas + 2 * block;
    first_visit = block + ctas[0];
    lists = 2 + ctas[1] - ctas[0];
  }
  const int* g_counts = p.lists.counts + int64_t{first_visit} * block_queries + query % block_queries;
  int before = 0;
  bool fits = lists <= kMaxLists;
  for (int first = 0; first < min(lists, kMaxLists); first += 32) {
    const int list = first + lane;
    int count = 0;
    if (list == 0) count = p.sample_counts[query];
    if (list > 0 && list < lists) count = g_counts[(list - 1) * block_queries];
    fits &= count <= (list == 0 ? kSampleList : p.lists.capacity);
    const int to_lane = before + static_cast<int>(sm90::sum_to_lane(static_cast<unsigned>(count)));
    if (list < lists && list < kMaxLists) shared.list_ends[list] = to_lane;
    before = __shfl_sync(~0u, to_lane, 31);
  }
  fits = __all_sync(~0u, fits) && before <= kMaxCandidates;
  if (lane == 0) {
    shared.candidates = before;
    shared.first_visit = first_visit;
    shared.fits = fits && (before >= p.topk || p.bars[query] == -INFINITY);
  }
}

using SelectKeys = Selector<SelectStorage>::Keys;

// The radix search begins with digits from the lowest key to the highest.
__device__ __forceinline__ topk_select::Start start_of_search(SelectStorage& shared, const SelectKeys& keys,
                                                              int pieces) {
  unsigned lowest = ~0u, highest = 0;
#pragma unroll
  for (int i = 0; i < SelectShape::kKeys; ++i) {
    if (i / kPiece >= pieces) break;
    if (keys[i] > 0) lowest = min(lowest, keys[i]);
    highest = max(highest, keys[i]);
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) shared.warp_lowest[warp] = lowest, shared.warp_highest[warp] = highest;
  __syncthreads();
  lowest = __reduce_min_sync(~0u, lane < SelectShape::kWarps ? shared.warp_lowest[lane] : ~0u);
  highest = __reduce_max_sync(~0u, lane < SelectShape::kWarps ? shared.warp_highest[lane] : 0);
  const int shift = max(0, 32 - __clz(highest - lowest) - SelectShape::kDigitBits);
  // Key 0 must not have a digit.
  if ((0 - lowest) >> shift < SelectShape::kBins) return Selector<SelectStorage>::kWhole;
  return {.low = lowest, .keys = 0, .shift = shift};
}

// The candidates of this thread that are selected, one bit each: those whose number is thread + i * kThreads.
__device__ __forceinline__ unsigned select_candidates(const Params& p, Selector<SelectStorage>& selector,
                                                      const QueryLists& lists, int candidates) {
  constexpr int kThreads = SelectShape::kThreads, kKeys = SelectShape::kKeys;
  const int pieces = (candidates + kThreads * kPiece - 1) / (kThreads * kPiece), thread = sm90::thread_index();
  SelectKeys keys;
#pragma unroll
  for (unsigned& key : keys) leave_undefined(key);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (i / kPiece >= pieces) break;
    const int candidate = thread + i * kThreads;
    keys[i] = candidate < candidates ? key_of(lists[candidate].logit) : 0;
  }
  if (candidates <= p.topk) return selector.bits_of(keys, pieces, [](unsigned key) { return key > 0; });
  unsigned bits = 0, wanted = p.topk;
  topk_select::Start start = start_of_search(selector.shared, keys, pieces);
  for (;;) {
    const Selection selection = selector.find(keys, pieces, wanted, 1, start);
    bits |= selector.bits_of(keys, pieces, [&](unsigned key) { return key > selection.threshold; });
    if (selection.ties == 0) return bits;
    // Once more, for the lowest ids of those that are equal.
    wanted = selection.ties;
    start = selector.kWhole;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i / kPiece >= pieces) break;
      keys[i] = keys[i] == selection.threshold ? ~static_cast<unsigned>(lists[thread + i * kThreads].key) : 0;
    }
  }
}

// Puts the selected candidates into the shared results, in id order; returns their number.
__device__ __forceinline__ int order_candidates(Selector<SelectStorage>& selector, const QueryLists& lists,
                                                unsigned bits, int2 window) {
  constexpr int kThreads = SelectShape::kThreads, kThreadWords = kIdWords / kThreads;
  SelectStorage& shared = selector.shared;
  uint64_t* words = shared.id_words();
  const int thread = threadIdx.x;
  const auto for_selected = [&](int first_id, auto act) {
    for (unsigned left = bits; left != 0; left &= left - 1) {
      const Candidate candidate = lists[thread + (__ffs(left) - 1) * kThreads];
      const unsigned bit = candidate.key - first_id;
      if (bit < kIdBits) act(candidate, bit);
    }
  };
  int placed = 0;
  for (int first_id = window.x / kWordBits * kWordBits; first_id < window.y; first_id += kIdBits) {
    for (int i = thread; i < kIdWords; i += kThreads) words[i] = 0;
    __syncthreads();
    for_selected(first_id, [&](const Candidate&, unsigned bit) {
      atomicOr(reinterpret_cast<unsigned*>(words) + bit / 32, 1u << bit % 32);
    });
    __syncthreads();
    unsigned thread_bits = 0;
#pragma unroll
    for (int i = 0; i < kThreadWords; ++i) thread_bits += __popcll(words[thread * kThreadWords + i]);
    const unsigned to_lane = sm90::sum_to_lane(thread_bits);
    const uint2 sums = selector.sum_warps(__shfl_sync(~0u, to_lane, 31));
    unsigned before = placed + sums.x + to_lane - thread_bits;
#pragma unroll
    for (int i = 0; i < kThreadWords; ++i) {
      shared.before[thread * kThreadWords + i] = static_cast<uint16_t>(before);
      before += __popcll(words[thread * kThreadWords + i]);
    }
    __syncthreads();
    for_selected(first_id, [&](const Candidate& candidate, unsigned bit) {
      const uint64_t lower = words[bit / kWordBits] & ((uint64_t{1} << bit % kWordBits) - 1);
      const int place = shared.before[bit / kWordBits] + __popcll(lower);
      shared.values[place] = candidate.logit;
      shared.ids[place] = candidate.key;
    });
    placed += static_cast<int>(sums.y);
    __syncthreads();
  }
  return placed;
}

__global__ void __launch_bounds__(SelectShape::kThreads, SelectShape::kCtasPerSm)
    select_listed_kernel(const __grid_constant__ Params p) {
  constexpr int kThreads = SelectShape::kThreads;
  extern __shared__ __align__(16) char shared_bytes_[];
  SelectStorage& shared = *reinterpret_cast<SelectStorage*>(shared_bytes_);
  const int query = blockIdx.x, thread = threadIdx.x;
  if (thread < 32) measure_lists(p, shared, query);
  Selector<SelectStorage> selector{shared};
  selector.clear(shared.histograms[0]);
  __syncthreads();
  if (thread == 0) {
    const int2 window = window_of(p, query);
    p.redo_starts[query] = shared.fits ? 0 : window.x;
    p.redo_ends[query] = shared.fits ? 0 : window.y;
  }
  if (!shared.fits) return;

  const QueryLists lists{p, shared};
  const unsigned bits = select_candidates(p, selector, lists, shared.candidates);
  __syncthreads();
  const int selected = order_candidates(selector, lists, bits, window_of(p, query));
  int* g_indices = p.indices + int64_t{query} * p.topk;
  float* g_values = p.values + int64_t{query} * p.topk;
  for (int i = thread; i < p.topk; i += kThreads) {
    g_indices[i] = i < selected ? shared.ids[i] : -1;
    g_values[i] = i < selected ? shared.values[i] : -INFINITY;
  }
}

}  // namespace dsa::indexer_topk
