// The logits of indexer_logits, of which only those above a bar are stored, as lists of candidates.
//
// A multiply thread that finds a candidate takes the next place of its query's list, with a counter in shared memory.
// Lists belong to a visit of a CTA to a block of queries, and are in no order.
#pragma once

#include "ops/indexer/indexer_logits/instances.cuh"
#include "params.h"
#include "plan.h"

namespace dsa::indexer_topk {

using indexer_logits::Config, indexer_logits::kMathThreads, indexer_logits::kThreads, indexer_logits::Visit;

template <Config kC>
class ListWriter {
  static constexpr int kQueries = kC.queries(), kLogits = kC.pass_queries() / 2;
  static constexpr int kBarrier = 1;  // of all multiply threads
  static_assert(indexer_logits::kPartKeys == kSampledPart);

  const indexer_logits::Params& p_;
  const Lists& lists_;
  unsigned* counts_;
  int block_, query_;  // the lane's first query, counted from the block's first one
  unsigned list_;      // of that query: its first candidate
  float bars_[kLogits];

  __device__ __forceinline__ int visit() const { return block_ + static_cast<int>(blockIdx.x); }

 public:
  __device__ __forceinline__ ListWriter(const indexer_logits::Params& p, const Lists& lists, unsigned* counts,
                                        const Visit& visited)
      : p_(p), lists_(lists), counts_(counts), block_(visited.block), query_(visited.query - block_ * kQueries) {
    list_ = (visit() * kQueries + query_) * lists.capacity;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      bars_[i] = visited.query + 2 * i < p.seq ? lists.bars[visited.query + 2 * i] : INFINITY;
    }
    if (threadIdx.x < kQueries) counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      if (visited.has_first_tile) lists.block_ctas[2 * block_] = blockIdx.x;
      if (visited.has_last_tile) lists.block_ctas[2 * block_ + 1] = blockIdx.x;
    }
    sm90::sync_threads<kBarrier, kMathThreads>();
  }
  // Sampled parts have been scored.
  __device__ __forceinline__ bool skips(int tile, int part) const {
    const int first_key = tile * indexer_logits::kTileKeys;
    return part == 0 && (first_key & lists_.period - 1) == 0 && first_key + kSampledPart <= p_.seq_kv;
  }
  __device__ __forceinline__ void put(int i, int /*first_key*/, int key, float logit, bool visible = true) {
    if (visible && logit > bars_[i / 2]) {
      const unsigned place = atomicAdd(counts_ + query_ + i, 1);
      if (place < lists_.capacity) lists_.candidates[list_ + i * lists_.capacity + place] = {logit, key};
    }
  }
  __device__ __forceinline__ void finish() {
    sm90::sync_threads<kBarrier, kMathThreads>();
    if (threadIdx.x < kQueries) {
      lists_.counts[visit() * kQueries + threadIdx.x] = static_cast<int>(counts_[threadIdx.x]);
    }
  }
};

template <Config kC>
struct ListTarget {
  const Lists& lists;
  unsigned* counts;  // [queries of a block], in shared memory

  __device__ __forceinline__ ListWriter<kC> writer(const indexer_logits::Params& p, const Visit& visit) const {
    return {p, lists, counts, visit};
  }
};

template <class Element, Config kC>
struct ListStorage : indexer_logits::SharedStorage<Element, kC> {
  unsigned counts[kC.queries()];
};

template <class Element, int kRowBytes, int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    listed_scores_kernel(const __grid_constant__ indexer_logits::Params p, const __grid_constant__ Lists lists,
                         const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map) {
  constexpr Config kC{kRowBytes, kHeads};
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<ListStorage<Element, kC>*>(shared_bytes_);
  indexer_logits::score<Element, kC>(shared, p, ListTarget<kC>{lists, shared.counts}, q_map, k_map);
}

template <class Element>
const char* launch_lists_of(const indexer_logits::Params& p, const Lists& lists, void* stream) {
  return indexer_logits::launch_instance<Element>(
      p, [&]<class E, int kRowBytes, int kHeads>(const CUtensorMap& q_map, const CUtensorMap& k_map) {
        if constexpr (kHeads < kMinFilterHeads) {
          return "no kernel lists candidates of so few heads";
        } else {
          constexpr int kSharedBytes = sizeof(ListStorage<E, Config{kRowBytes, kHeads}>);
          static_assert(kSharedBytes <= sm90::kMaxSharedBytes);
          return sm90::launch_kernel<listed_scores_kernel<E, kRowBytes, kHeads>>(
              p.device, unsigned(p.num_sms), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), p, lists, q_map,
              k_map);
        }
      });
}

}  // namespace dsa::indexer_topk
