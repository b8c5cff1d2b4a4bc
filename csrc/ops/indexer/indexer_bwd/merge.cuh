// Merges the lists of a group of queries, so that a key that several queries list is read, and added to, once.
#pragma once

#include <cuda_bf16.h>

#include "config.h"
#include "params.h"

namespace dsa::indexer_bwd {

// The keys that a query sees if there are no lists.
struct Bounds {
  int begin, end;

  __device__ __forceinline__ Bounds(const Params& p, int query)
      : begin(max(0, p.starts[query * p.starts_stride])), end(min(p.seq_kv, p.ends[query * p.ends_stride])) {}
};

// Visits a query's slots in order, by one warp. Calls visit(slot, key, is_key, is_first) in every lane: is_key if the
// key lies in the window, is_first if no earlier slot has it. The first slot of a key sets (`set`) or clears its bit.
template <class Visit>
__device__ __forceinline__ void visit_in_order(const int* g_ids, int slots, unsigned first_key, unsigned keys,
                                               unsigned* bits, bool set, const Visit& visit) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < slots; first += 32) {
    const unsigned key = (first + lane < slots ? static_cast<unsigned>(g_ids[first + lane]) : ~0u) - first_key;
    const bool is_key = key < keys;
    const unsigned same = __match_any_sync(~0u, is_key ? key : ~lane);
    bool is_first = is_key && __ffs(same) - 1 == lane;
    if (is_first) {
      const unsigned bit = 1u << key % 32;
      const unsigned before = set ? atomicOr(bits + key / 32, bit) : atomicAnd(bits + key / 32, ~bit);
      is_first = ((before & bit) != 0) != set;
    }
    visit(first + lane, key, is_key, is_first);
  }
}

// Prefix sum of `value` over the threads up to this one, and the total. Needs a __syncthreads before the next call.
__device__ __forceinline__ int2 inclusive_sum(int value, int (&s_sums)[kMaxMergeWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int other = __shfl_up_sync(~0u, value, lanes);
    if (lane >= lanes) value += other;
  }
  if (lane == 31) s_sums[warp] = value;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < blockDim.x / 32; ++i) {
    if (i < warp) before += s_sums[i];
    all += s_sums[i];
  }
  return {before + value, all};
}

// Calls use(slot, key) for this thread's slots that list one of `keys` keys from `first_key` on; `key` counts from
// there.
template <class Use>
__device__ __forceinline__ void for_slots_of_window(const int* g_ids, int slots, int first_key, unsigned keys,
                                                    const Use& use) {
#pragma unroll 8
  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const unsigned key = static_cast<unsigned>(__ldg(g_ids + slot)) - first_key;
    if (key < keys) use(slot, key);
  }
}

// Words [begin, end) of the keys that any query lists: a word's bits are keys, and `s_own` has `words` of each query.
struct Union {
  int keys = 0, listed = 0;  // bits of the union, and of all queries

  __device__ __forceinline__ Union(const unsigned* s_own, unsigned* s_all, int words, int queries, int begin, int end) {
    for (int word = begin; word < end; ++word) {
      unsigned all = 0;
      for (int query = 0; query < queries; ++query) {
        all |= s_own[query * words + word];
        listed += __popc(s_own[query * words + word]);
      }
      s_all[word] = all;
      keys += __popc(all);
    }
  }
};

// One block per group. Keys are bits of words, in windows: one array per query, and one of all queries.
__global__ void __launch_bounds__(kMaxMergeWarps * 32, 3) merge_lists_kernel(const __grid_constant__ Params p) {
  extern __shared__ unsigned s_words[];
  __shared__ int s_sums[3][kMaxMergeWarps];
  __shared__ unsigned s_listing;
  const int group_queries = queries_of_group(p.heads), threads = blockDim.x, warp = threadIdx.x / 32;
  const int first_query = p.first_query + blockIdx.x * group_queries;
  const int queries = min(group_queries, p.seq - first_query);
  const int words = merge_words(group_queries, p.seq_kv);
  unsigned* const s_all = s_words;                                // keys that any query lists
  int* const s_before = reinterpret_cast<int*>(s_words + words);  // entries before each word
  const auto own = [&](int query) { return s_words + (2 + query) * words; };
  int* const g_entries = p.entries + static_cast<int64_t>(blockIdx.x) * p.capacity;
  __nv_bfloat16* const g_gradients =
      static_cast<__nv_bfloat16*>(p.gradients) + static_cast<int64_t>(blockIdx.x) * p.capacity * group_queries;
  const auto clear_gradients = [&](int begin, int end) {
    for (int query = 0; query < group_queries; ++query) {
      for (int i = begin + threadIdx.x; i < end; i += threads)
        g_gradients[gradient_place(i, query, group_queries)] = 0.f;
    }
  };
  const auto ids_of = [&](int query) { return p.indices + (first_query + query) * p.indices_stride; };
  const auto dscores_of = [&](int query) { return p.dscores + (first_query + query) * p.dscores_stride; };
  if (threadIdx.x == 0) s_listing = 0;
  int count = 0;

  for (int first_key = 0; first_key < p.seq_kv; first_key += words * 32) {
    const unsigned keys = min(words * 32, p.seq_kv - first_key);
    for (int i = threadIdx.x; i < merge_arrays(group_queries) * words; i += threads) s_words[i] = 0;
    __syncthreads();
    int again = 0;  // slots whose key an earlier slot has; summed over threads
    for (int query = 0; query < queries; ++query) {
      const int slots_before = again;
      for_slots_of_window(ids_of(query), p.slots, first_key, keys, [&](int, unsigned key) {
        atomicOr(own(query) + key / 32, 1u << key % 32);
        ++again;
      });
      if (__any_sync(~0u, again > slots_before) && threadIdx.x % 32 == 0) atomicOr(&s_listing, 1u << query);
    }
    __syncthreads();

    const int run = (words + threads - 1) / threads;  // words per thread
    const int begin = min(static_cast<int>(threadIdx.x) * run, words), end = min(begin + run, words);
    const Union united(own(0), s_all, words, queries, begin, end);
    again = inclusive_sum(again - united.listed, s_sums[0]).y;
    const int2 sums = inclusive_sum(united.keys, s_sums[1]);
    int before = count + sums.x - united.keys;
    for (int word = begin; word < end; ++word) {
      s_before[word] = before;
      before += __popc(s_all[word]);
    }
    clear_gradients(count, count + sums.y);
    count += sums.y;
    __syncthreads();

    const auto write = [&](int query, int slot, unsigned key) {
      const int at = s_before[key / 32] + __popc(s_all[key / 32] & (1u << key % 32) - 1);
      g_entries[at] = first_key + key;  // queries that list the same key write the same id
      g_gradients[gradient_place(at, query, group_queries)] = __ldg(dscores_of(query) + slot);
    };
    if (again == 0) {
      for (int query = 0; query < queries; ++query) {
        for_slots_of_window(ids_of(query), p.slots, first_key, keys,
                            [&](int slot, unsigned key) { write(query, slot, key); });
      }
      __syncthreads();
      continue;
    }
    // Slots that repeat a key become entries of their own, after the others; one warp per query.
    int others = 0;
    if (warp < queries) {
      visit_in_order(ids_of(warp), p.slots, first_key, keys, own(warp), false,
                     [&](int slot, unsigned key, bool is_key, bool is_first) {
                       if (is_first) write(warp, slot, key);
                       others += is_key && !is_first;
                     });
    }
    const int end_of_warp = count + inclusive_sum(others, s_sums[2]).x;
    int at = __shfl_sync(~0u, end_of_warp - others, 0);
    if (warp < queries) {
      visit_in_order(ids_of(warp), p.slots, first_key, keys, own(warp), true,
                     [&](int slot, unsigned key, bool is_key, bool is_first) {
                       const unsigned mask = __ballot_sync(~0u, is_key && !is_first);
                       if (is_key && !is_first) {
                         const int place = at + __popc(mask & (1u << threadIdx.x % 32) - 1);
                         g_entries[place] = first_key + key;
                         for (int query = 0; query < group_queries; ++query) {
                           g_gradients[gradient_place(place, query, group_queries)] =
                               query == warp ? dscores_of(query)[slot] : 0.f;
                         }
                       }
                       at += __popc(mask);
                     });
    }
    count += again;
    __syncthreads();
  }

  const int end = (count + kTileKeys - 1) / kTileKeys * kTileKeys;
  for (int i = count + threadIdx.x; i < end; i += threads) g_entries[i] = -1;
  clear_gradients(count, end);
  __syncthreads();
  if (threadIdx.x == 0) p.counts[blockIdx.x] = count, p.listing[blockIdx.x] = s_listing;
}

inline constexpr int kEntryThreads = 256;

// The same for queries that see all keys within bounds: one thread per entry.
__global__ void __launch_bounds__(kEntryThreads) list_ranges_kernel(const __grid_constant__ Params p, int blocks) {
  const int group_queries = queries_of_group(p.heads), group = blockIdx.x / blocks;
  const int at = blockIdx.x % blocks * kEntryThreads + threadIdx.x;
  const int first_query = p.first_query + group * group_queries, end_query = min(first_query + group_queries, p.seq);
  int begin = p.seq_kv, end = 0;
  unsigned listing = 0;
  for (int query = first_query; query < end_query; ++query) {
    const Bounds bounds(p, query);
    if (bounds.begin >= bounds.end) continue;
    begin = min(begin, bounds.begin), end = max(end, bounds.end);
    listing |= 1u << query - first_query;
  }
  const int count = max(0, end - begin);
  if (at == 0) p.counts[group] = count, p.listing[group] = listing;
  if (at >= p.capacity) return;
  const int64_t entry = static_cast<int64_t>(group) * p.capacity + at;
  const int key = begin + at;
  bool is_seen = false;
  __nv_bfloat16* const g_gradients =
      static_cast<__nv_bfloat16*>(p.gradients) + static_cast<int64_t>(group) * p.capacity * group_queries;
  for (int query = first_query; query < first_query + group_queries; ++query) {
    float gradient = 0.f;
    if (at < count && query < end_query) {
      const Bounds bounds(p, query);
      if (key >= bounds.begin && key < bounds.end) {
        gradient = p.dscores[query * p.dscores_stride + key];
        is_seen = true;
      }
    }
    g_gradients[gradient_place(at, query - first_query, group_queries)] = gradient;
  }
  p.entries[entry] = is_seen ? key : -1;  // -1 also between the ranges, where a key may hold anything
}

// For deterministic calls: the keys and rows of entries; one thread per entry.
__global__ void __launch_bounds__(kEntryThreads) list_slots_kernel(const __grid_constant__ Params p, int slots) {
  const int i = blockIdx.x * kEntryThreads + threadIdx.x;
  if (i >= slots) return;
  const bool is_key = i % p.capacity < p.counts[i / p.capacity] && p.entries[i] >= 0;
  p.dk.slot_keys[0][i] = is_key ? p.entries[i] : unsigned(p.dk.keys);
  p.dk.slot_rows[0][i] = i;
}

}  // namespace dsa::indexer_bwd
