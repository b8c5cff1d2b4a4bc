// The best topk candidates of a row, in the order of their keys.
#pragma once

#include "ops/indexer/topk_select/kernel.cuh"
#include "params.h"
#include "plan.h"

namespace dsa::indexer_topk {

using namespace dsa::topk_select;
using indexer_logits::Candidate;

// A CTA holds all candidates of a row in registers. The smaller ones are for topk up to kSmallTopk.
inline constexpr int kSmallTopk = 2048;
using SmallShape = Shape<256, 5, 11, 4>;
using LargeShape = Shape<512, 4, 11, 2>;
static_assert(max_candidates(kSmallTopk) <= SmallShape::kHeld && max_candidates(kMaxTopk) <= LargeShape::kHeld);

// A set of keys, and how many of them are before a key.
template <int kKeys, int kThreads>
struct KeySet {
  static constexpr int kGroup = 128;  // keys of a uint4
  static constexpr int kThreadGroups = kKeys / kGroup / kThreads;
  static_assert(kKeys % (kGroup * kThreads) == 0);
  uint4 groups[kKeys / kGroup];
  unsigned short before[kKeys / kGroup];  // keys of the set in earlier groups

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kKeys / kGroup; i += kThreads) groups[i] = {};
  }
  __device__ __forceinline__ void insert(int key) {
    atomicOr(reinterpret_cast<unsigned*>(groups) + key / 32, 1u << key % 32);
  }
  // After all insertions. Called by all threads.
  template <class Selector>
  __device__ __forceinline__ void count(Selector& selector) {
    __syncthreads();
    const auto size_of = [&](int group) {
      const uint4 words = groups[group];
      return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
    };
    const int first = threadIdx.x * kThreadGroups;
    unsigned mine = 0;
    for (int i = 0; i < kThreadGroups; ++i) mine += size_of(first + i);
    const unsigned to_lane = sum_to_lane(mine);
    unsigned sum = selector.sum_warps(__shfl_sync(~0u, to_lane, 31)).x + to_lane - mine;
    for (int i = 0; i < kThreadGroups; ++i) {
      before[first + i] = static_cast<unsigned short>(sum);
      sum += size_of(first + i);
    }
    __syncthreads();
  }
  __device__ __forceinline__ int rank(int key) const {
    const uint4 words = groups[key / kGroup];
    const int word = key % kGroup / 32;
    const unsigned lower = (1u << key % 32) - 1;
    return before[key / kGroup] + __popc(words.x & (word > 0 ? ~0u : lower)) +
           __popc(words.y & (word > 1    ? ~0u
                             : word == 1 ? lower
                                         : 0)) +
           __popc(words.z & (word > 2    ? ~0u
                             : word == 2 ? lower
                                         : 0)) +
           __popc(words.w & (word == 3 ? lower : 0));
  }
};

template <class Shape, int kTopk, int kKeys>
struct SelectStorage : SelectorStorage<Shape> {
  Entries<float, kTopk> entries;
  KeySet<kKeys, Shape::kThreads> set;
};

template <class Shape, int kTopk, int kKeys>
__global__ void __launch_bounds__(Shape::kThreads, kKeys > kMaxKeysOfSmall ? 1 : Shape::kCtasPerSm)
    select_candidates_kernel(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(128) char shared_bytes_[];
  using Storage = SelectStorage<Shape, kTopk, kKeys>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes_);
  Selector<Storage> selector{shared};
  selector.clear(shared.histograms[0]);
  shared.set.clear();
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();

  const int row = blockIdx.x;
  const float bar = p.above.bars[row];
  const int count = static_cast<int>(min(p.above.counts[row], unsigned(p.above.max) + 1));
  // All that are above the bar are candidates, so topk of them are the best of all, as are all if there is no bar.
  const bool wanted = count > p.above.max || (count < p.results.topk && bar > -INFINITY);
  if (threadIdx.x == 0) {
    p.starts[row] = wanted ? p.results.starts[row * p.results.starts_stride] : 0;
    p.ends[row] = wanted ? p.results.ends[row * p.results.ends_stride] : 0;
    p.wanted[row] = wanted;
  }
  if (wanted) {
    if (threadIdx.x == 0) *p.any_left = 1;
    return;
  }

  const Candidate* candidates = p.above.candidates + int64_t{row} * p.above.max;
  const int pieces = pieces_for<Shape>(count), first = held_place(pieces);
  unsigned keys[Shape::kKeys], highest = 0;
  int ids[Shape::kKeys];
#pragma unroll
  for (unsigned& key : keys) leave_undefined(key);
  const auto for_each = [&](auto act) {  // with the number of each held candidate
#pragma unroll
    for (int i = 0; i < Shape::kKeys; ++i) {
      if (i / kPiece >= pieces) break;
      act(i);
    }
  };
  const auto place_of = [&](int i) { return first + i / kPiece * kWarpPiece + i % kPiece; };
#pragma unroll
  for (int i = 0; i < Shape::kKeys; i += 2) {
    if (i / kPiece >= pieces) break;
    const int place = place_of(i);  // even; the list has an even number of places
    const int4 pair = place < count ? *reinterpret_cast<const int4*>(candidates + place) : int4{};
    keys[i] = place < count ? key_of(__int_as_float(pair.x)) : 0;
    keys[i + 1] = place + 1 < count ? key_of(__int_as_float(pair.z)) : 0;
    ids[i] = pair.y, ids[i + 1] = pair.w;
    highest = max(highest, max(keys[i], keys[i + 1]));
  }
  selector.set_maximum(highest);
  __syncthreads();
  const Start start = selector.start_from(bar > -INFINITY ? key_of(bar) + 1 : 0, 0);
  const Selection selection = selector.find(keys, pieces, p.results.topk, 1, start);

  // Of keys that are equal to the last one to keep, the first ones are kept.
  unsigned ties = 0;
  if (selection.ties > 0) {
    const unsigned equal = selector.bits_of(keys, pieces, [&](unsigned key) { return key == selection.threshold; });
    for_each([&](int i) {
      if (equal >> i & 1) shared.set.insert(ids[i]);
    });
    shared.set.count(selector);
    for_each([&](int i) {
      if ((equal >> i & 1) && shared.set.rank(ids[i]) < static_cast<int>(selection.ties)) ties |= 1u << i;
    });
    __syncthreads();
    shared.set.clear();
    __syncthreads();
  }
  const unsigned kept = ties | selector.bits_of(keys, pieces, [&](unsigned key) { return key > selection.threshold; });
  for_each([&](int i) {
    if (kept >> i & 1) shared.set.insert(ids[i]);
  });
  shared.set.count(selector);
  for_each([&](int i) {
    if (!(kept >> i & 1)) return;
    const int rank = shared.set.rank(ids[i]);
    shared.entries.ids[rank] = ids[i];
    // Keys have lost the sign of zeros.
    shared.entries.values[rank] = keys[i] == kZeroKey ? candidates[place_of(i)].logit : value_of(keys[i]);
  });
  write_row<float, false>(p.results, selector, row, min(count, p.results.topk), 1);
}

}  // namespace dsa::indexer_topk
