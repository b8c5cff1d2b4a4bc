// The logits above each row's bar, listed instead of all logits being stored. Warps that multiply note what they find
// in shared memory; warps that have nothing else to do move it to the lists.
#pragma once

#include "config.h"
#include "params.h"
#include "sample.h"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"

namespace dsa::indexer_logits {

// A logit that a warp has found, and its column times the queries of a pass plus its query.
struct alignas(8) Find {
  float logit;
  int place;
};

// What a warp hands over, in two buffers. kFull: with more, there may be no room for what is found before the next
// chance.
template <int kRoom_, int kFull_>
struct Finds {
  static constexpr int kRoom = kRoom_, kFull = kFull_;
  Find finds[2][kRoom];
  int counts[2], first_queries[2];  // a count of -1: nothing follows
  uint64_t full[2], empty[2];       // barriers

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      sm90::barrier_init(&full[i], 1);
      sm90::barrier_init(&empty[i], 1);
    }
  }
};

// How many of the voted lanes are before this one.
__device__ __forceinline__ int lanes_before(unsigned lanes) { return __popc(lanes & ((1u << threadIdx.x % 32) - 1)); }

// The side of a multiplying warp. Called by all its lanes. What branches depend on is voted on, so that the compiler
// knows that the warp stays together: if not, it keeps the descriptors of all products in ordinary registers.
template <class Finds>
struct Finder {
  Finds& shared;
  unsigned turn = 0;                                     // of the buffers
  uint32_t end = sm90::shared_address(shared.finds[0]);  // behind the last find

  __device__ __forceinline__ uint32_t begin() const { return sm90::shared_address(shared.finds[turn % 2]); }
  __device__ __forceinline__ int count() const { return static_cast<int>(end - begin()) / int(sizeof(Find)); }

  // Notes a lane's logit if it is `wanted`.
  __device__ __forceinline__ void add(bool wanted, int place, float logit) {
    const unsigned lanes = __ballot_sync(~0u, wanted);
    if (lanes == 0) return;
    const uint32_t address = end + lanes_before(lanes) * unsigned{sizeof(Find)};
    if (wanted) sm90::store_shared(address, make_uint2(__float_as_uint(logit), place));
    end += __popc(lanes) * unsigned{sizeof(Find)};
  }
  __device__ __forceinline__ void hand_over(int first_query, int count) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      shared.counts[turn % 2] = count;
      shared.first_queries[turn % 2] = first_query;
      sm90::arrive(&shared.full[turn % 2]);
    }
    ++turn;
    while (!__all_sync(~0u, sm90::test_wait(&shared.empty[turn % 2], ~(turn / 2) % 2))) {
    }
    end = begin();
  }
  __device__ __forceinline__ void hand_over_if_full(int first_query) {
    if (__any_sync(~0u, count() > Finds::kFull)) hand_over(first_query, count());
  }
  __device__ __forceinline__ void hand_over_rest(int first_query) {
    if (__any_sync(~0u, count() > 0)) hand_over(first_query, count());
  }
  __device__ __forceinline__ void finish() { hand_over(0, -1); }
};

// Moves what the multiplying warps hand over to the lists. Run by kSpareThreads threads, in groups: each has one warp.
// A group goes on once all its lanes have seen the barrier's phase, so that they stay together.
template <int kQueries, class Finds>
__device__ __forceinline__ void collect(Finds* all, const Above& above, int thread) {
  constexpr int kGroup = 5;
  static_assert(kMathThreads / 32 <= kSpareThreads / 32 * (32 / kGroup));
  const int lane = thread % 32, index = lane % kGroup;
  const unsigned group = (1u << kGroup) - 1 << lane / kGroup * kGroup;
  const int warp = lane / kGroup + thread / 32 * (32 / kGroup);
  bool watches = lane / kGroup < 32 / kGroup && warp < kMathThreads / 32;
  Finds& shared = all[watches ? warp : 0];
  for (unsigned turn = 0; __any_sync(~0u, watches);) {
    const unsigned buffer = turn % 2;
    const unsigned lanes = __ballot_sync(~0u, watches && sm90::test_wait(&shared.full[buffer], turn / 2 % 2));
    const bool ready = (lanes & group) == group;
    if (lanes == 0) __nanosleep(100);
    if (ready) {
      const int count = shared.counts[buffer], first_query = shared.first_queries[buffer];
      for (int i = index; i < count; i += kGroup) {
        const Find find = shared.finds[buffer][i];
        const int64_t row = first_query + find.place % kQueries;
        const unsigned place = atomicAdd(above.counts + row, 1u);
        if (place < static_cast<unsigned>(above.max)) {
          above.candidates[row * above.max + place] = {find.logit, key_of_other(find.place / kQueries)};
        }
      }
      watches = count >= 0;
      ++turn;
    }
    __syncwarp();
    if (ready && index == 0) sm90::arrive(&shared.empty[buffer]);
  }
}

}  // namespace dsa::indexer_logits
