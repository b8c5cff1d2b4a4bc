// Kernels that merge the lists of each run, undo that for runs whose keys are not finite, and list the items of a
// launch.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "ops/shared/merged_lists/params.h"
#include "sm90/atomics.cuh"
#include "sm90/matrix_copy.cuh"
#include "tiles/visibility.cuh"

namespace dsa::merged_lists {

using listed_keys::Problem;

// Neighboring queries of a sequence and group.
struct Run {
  int b, s, group, queries;

  __device__ __forceinline__ Run(const Problem& p, const Lists& lists, int index) {
    index += lists.first_run;
    group = index % p.groups;
    index /= p.groups;
    const int runs = static_cast<int>(runs_of_sequence(p.seq_q, lists.queries));
    s = index % runs * lists.queries;
    b = index / runs;
    queries = min(lists.queries, p.seq_q - s);
  }
  // Index of the first query, among [batch, seq_q, groups].
  __device__ __forceinline__ int first_item(const Problem& p) const { return (b * p.seq_q + s) * p.groups + group; }
};

// A query's list.
struct List {
  const int* g_ids;
  int slots;
  tiles::VisibleIds ids;

  __device__ __forceinline__ List() {}
  __device__ __forceinline__ List(const Problem& p, const Run& run, int query)
      : g_ids(p.indices + run.b * p.indices_stride_b + (run.s + query) * p.indices_stride_s +
              run.group * p.indices_stride_g),
        slots(tiles::used_slots(p, run.b, run.s + query)),
        ids(tiles::visible_ids(p, run.b, run.s + query)) {}
};

// Whether any of 8 bf16 numbers is not finite: 0 times it is NaN.
__device__ __forceinline__ bool is_unfit(const uint4& piece) {
  const __nv_bfloat162 zero = __float2bfloat162_rn(0.f);
  __nv_bfloat162 sum = zero;
  for (const uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
    sum = __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&pair), zero, sum);
  }
  return (*reinterpret_cast<const uint32_t*>(&sum) & 0x7fff7fffu) != 0;
}

inline constexpr int kMergeThreads = 256;
inline constexpr int kWindowBytes = 40 * 1024;

// A word holds a field of bits for each of its keys, a bit for each query that lists the key.
constexpr int keys_of_word(int queries) { return 32 / queries; }
// Words of a window of keys, a multiple of those that the warps of a block read at a time.
constexpr int window_words(int queries, int64_t seq_kv) {
  const int64_t words = (seq_kv + keys_of_word(queries) - 1) / keys_of_word(queries);
  return static_cast<int>(
      std::min<int64_t>(kWindowBytes / 4, (words + kMergeThreads - 1) / kMergeThreads * kMergeThreads));
}

// Whether this thread's part of `rows` rows of `columns` bf16 numbers has one that is not finite. `row_of` gives a
// row's offset in elements.
template <class RowOf>
__device__ __forceinline__ bool has_unfit_rows(const void* g_first, int rows, int columns, const RowOf& row_of) {
  const unsigned pieces = columns / 8;
  bool unfit = false;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < rows * pieces; i += kMergeThreads) {
    const auto* g_row = static_cast<const __nv_bfloat16*>(g_first) + row_of(static_cast<int>(i / pieces));
    unfit |= is_unfit(__ldg(reinterpret_cast<const uint4*>(g_row) + i % pieces));
  }
  return unfit;
}

__device__ __forceinline__ bool has_unfit_operands(const Problem& p, const Run& run, const Conditions& conditions) {
  const int group_heads = p.heads / p.groups, first_head = run.group * group_heads, rows = run.queries * group_heads;
  const auto q_row = [&](int row) {
    return run.b * p.q_stride_b + (run.s + row / group_heads) * p.q_stride_s +
           (first_head + row % group_heads) * p.q_stride_h;
  };
  const auto dout_row = [&](int row) {
    const int64_t query = static_cast<int64_t>(run.b) * p.seq_q + run.s + row / group_heads;
    return (query * p.heads + first_head + row % group_heads) * conditions.d_v;
  };
  return has_unfit_rows(p.q, rows, p.d_qk, q_row) || has_unfit_rows(conditions.dout, rows, conditions.d_v, dout_row);
}

// Sets a query's bit in the fields of the keys that it lists, of the `keys` keys from `first_key` on. Returns whether
// this thread found that the list repeats a key or, with kInOrder, that it is not in order.
template <int kQueries, bool kInOrder>
__device__ __forceinline__ bool set_bits(List list, int query, int first_key, int keys, uint32_t s_fields) {
  constexpr unsigned kKeys = keys_of_word(kQueries);
  constexpr int kLoads = 8;
  const int begin = max(list.ids.begin, first_key), end = min(list.ids.end, first_key + keys);
  const tiles::VisibleIds ids = {begin, max(begin, end)};
  unsigned found = 0;
  for (int slot = threadIdx.x; slot < list.slots; slot += kLoads * kMergeThreads) {
    int loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = slot + i * kMergeThreads < list.slots ? __ldg(list.g_ids + slot + i * kMergeThreads) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const unsigned key = static_cast<unsigned>(loaded[i]) - first_key;
      const unsigned bit = __funnelshift_l(1u << query, 1u << query, key * kQueries);  // the shift is taken modulo 32
      if (ids.has(loaded[i])) found |= sm90::atomic_or(s_fields + key / kKeys * 4, bit) & bit;
    }
    if constexpr (kInOrder) {
      const tiles::VisibleIds visible = list.ids;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = slot + i * kMergeThreads;
        const int before = at > 0 && at < list.slots ? __ldg(list.g_ids + at - 1) : visible.begin - 1;
        const bool follows = at == 0 || (visible.has(before) && before < loaded[i]);
        found |= visible.has(loaded[i]) && !follows;
      }
    }
  }
  return found != 0;
}

// The lowest bit of each field of a word that is not 0.
template <int kQueries>
__device__ __forceinline__ unsigned listed_keys_of(unsigned fields) {
#pragma unroll
  for (int bits = kQueries / 2; bits > 0; bits /= 2) fields |= fields >> bits;
  return fields & (kQueries == 2 ? 0x55555555u : kQueries == 4 ? 0x11111111u : 0x01010101u);
}

// One block per run. Keys are fields of words, in windows. Warps take equal parts of a window, 32 words at a time.
template <int kQueries, bool kInOrder>
__global__ void __launch_bounds__(kMergeThreads, kInOrder ? 5 : 6)
    merge_lists_kernel(const __grid_constant__ Problem p, const __grid_constant__ Lists lists,
                       const __grid_constant__ Conditions conditions) {
  constexpr int kKeys = keys_of_word(kQueries), kWarps = kMergeThreads / 32, kHalf = kQueries / 2;
  extern __shared__ unsigned s_fields[];
  __shared__ List s_lists[kQueries];
  __shared__ int s_counts[kWarps];
  const Run run(p, lists, blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int words = window_words(kQueries, p.seq_kv), begin = words / kWarps * warp, end = begin + words / kWarps;
  unsigned* const g_entries = lists.entries + static_cast<int64_t>(blockIdx.x) * lists.capacity;
  if (threadIdx.x < run.queries) s_lists[threadIdx.x] = List(p, run, threadIdx.x);
  __syncthreads();
  // The most tiles that the merged list may have, and those of the first half of the queries: if these share so little
  // that they exceed theirs (midway between no sharing and what is allowed, and 5 % more), the others are not read.
  // Only the first window decides by halves, as later ones begin with the keys of all queries before them.
  const int percents[2] = {min(100, (100 + lists.percent) / 2 + 5), lists.percent};
  int most_tiles[2], tiles = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int query = half * kHalf; query < min(run.queries, (half + 1) * kHalf); ++query) {
      tiles += static_cast<int>(tiles_of_list(s_lists[query].slots));
    }
    most_tiles[half] = static_cast<int>((int64_t{tiles} * percents[half] + (half == 0 ? 99 : 0)) / 100);
  }

  int count = 0;
  bool is_merged = true;
  for (int first_key = 0; first_key < p.seq_kv; first_key += words * kKeys) {
    for (int i = threadIdx.x; i < words; i += kMergeThreads) s_fields[i] = 0;
    __syncthreads();
    bool obstacle = false;  // found by this thread
    int at, total;          // the entries before this warp's; those of the window
#pragma unroll 1
    for (int half = 0; half < 2 && is_merged; ++half) {
      for (int query = half * kHalf; query < min(run.queries, (half + 1) * kHalf); ++query) {
        obstacle |= set_bits<kQueries, kInOrder>(s_lists[query], query, first_key, words * kKeys,
                                                 sm90::shared_address(s_fields));
      }
      __syncthreads();
      int keys = 0;
      for (int i = begin + lane; i < end; i += 32) keys += __popc(listed_keys_of<kQueries>(s_fields[i]));
      keys = __reduce_add_sync(~0u, keys);
      if (lane == 0) s_counts[warp] = keys;
      __syncthreads();
      at = count, total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        at += w < warp ? s_counts[w] : 0;
        total += s_counts[w];
      }
      const bool too_many = tiles_of_list(count + total) > most_tiles[half] && (half == 1 || first_key == 0);
      is_merged = !__syncthreads_or(obstacle || too_many);
    }
    if (!is_merged) break;
    for (int i = begin + lane; i < end; i += 32) {
      const unsigned fields = s_fields[i];
      unsigned listed = listed_keys_of<kQueries>(fields);
      if (!__any_sync(~0u, listed != 0)) continue;
      const int own = __popc(listed);
      int to = own;  // entries up to those of this lane
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, to, lanes);
        to += lane >= lanes ? before : 0;
      }
      const unsigned key = first_key + i * kKeys;
      for (unsigned* g_to = g_entries + at + to - own; listed != 0; listed &= listed - 1) {
        const unsigned bit = __ffs(listed) - 1;
        *g_to++ = key + bit / kQueries | (fields >> bit & (1u << kQueries) - 1) << kIdBits;
      }
      at += __shfl_sync(~0u, to, 31);
    }
    count += total;
    __syncthreads();
  }
  if (is_merged && conditions.dout != nullptr) is_merged = !__syncthreads_or(has_unfit_operands(p, run, conditions));
  if (threadIdx.x == 0) lists.counts[blockIdx.x] = is_merged ? count : -1;
}

inline constexpr int kKeyThreads = 256, kWarpKeys = 32 * 32 / kKeyThreads;

// Whether a run's entries, which are in ascending order, have this key. Other threads may undo the run's merging
// meanwhile, for another key: then either answer will do.
__device__ __forceinline__ bool lists_key(const Lists& lists, int run, int key) {
  const unsigned* const g_entries = lists.entries + static_cast<int64_t>(run) * lists.capacity;
  const int count = lists.counts[run];
  int begin = 0;
  for (int end = count; begin < end;) {
    const int middle = (begin + end) / 2;
    if ((g_entries[middle] & kIdMask) < key) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < count && (g_entries[begin] & kIdMask) == key;
}

// Undoes the merging of runs that list a key with a number that is not finite. One block per 32 keys, of the sequences
// from `first_b` on.
__global__ void __launch_bounds__(kKeyThreads)
    drop_unfit_runs_kernel(const __grid_constant__ Problem p, const __grid_constant__ Lists lists, int first_b) {
  __shared__ unsigned s_unfit;
  const int blocks = (p.seq_kv + 31) / 32, first_key = blockIdx.x % blocks * 32;
  const int b = first_b + blockIdx.x / blocks / p.groups, group = blockIdx.x / blocks % p.groups;
  // The sequence's runs of this launch.
  const int64_t runs = runs_of_sequence(p.seq_q, lists.queries) * p.groups;
  const int begin = static_cast<int>(max(int64_t{0}, b * runs - lists.first_run));
  const int end = static_cast<int>(min(int64_t{lists.runs}, (b + 1) * runs - lists.first_run));
  bool any = false;  // merged
  for (int first = begin; !any && first < end; first += kKeyThreads) {
    const int run = first + threadIdx.x;
    any = __syncthreads_or(run < end && lists.counts[run] > 0);
  }
  if (!any) return;
  if (threadIdx.x == 0) s_unfit = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys, pieces = p.d_qk / 8;
  const __nv_bfloat16* g_keys = static_cast<const __nv_bfloat16*>(p.kv) + b * p.kv_stride_b + group * p.kv_stride_g;
  bool unfit[kWarpKeys] = {};
#pragma unroll
  for (int i = 0; i < kWarpKeys; ++i) {
    const int key = first_key + first + i;
    const auto* g_pieces = reinterpret_cast<const uint4*>(g_keys + key * p.kv_stride_s);
    for (int piece = lane; key < p.seq_kv && piece < pieces; piece += 32) unfit[i] |= is_unfit(__ldg(g_pieces + piece));
  }
#pragma unroll
  for (int i = 0; i < kWarpKeys; ++i) {
    if (__any_sync(~0u, unfit[i]) && lane == 0) atomicOr(&s_unfit, 1u << first + i);
  }
  __syncthreads();
  for (unsigned left = s_unfit; left != 0; left &= left - 1) {
    const int key = first_key + __ffs(left) - 1;
    for (int run = begin + threadIdx.x; run < end; run += kKeyThreads) {
      if (Run(p, lists, run).group == group && lists_key(lists, run, key)) lists.counts[run] = -1;
    }
  }
}

inline constexpr int kListThreads = 1024;

// One block lists the items.
__global__ void __launch_bounds__(kListThreads)
    list_items_kernel(const __grid_constant__ Problem p, const __grid_constant__ Lists lists) {
  using Scan = cub::BlockScan<int, kListThreads>;
  __shared__ typename Scan::TempStorage s_scan;
  constexpr int kShift = 16;  // merged runs are counted in the higher half of a word, other queries in the lower half
  static_assert(kListThreads * kMaxQueries < 1 << kShift);
  const auto is_merged = [&](int run) { return run < lists.runs && lists.counts[run] >= 0; };
  int merged = 0;
  for (int first = 0; first < lists.runs; first += kListThreads)
    merged += __syncthreads_count(is_merged(first + threadIdx.x));
  int next_run = 0, next_query = merged;
  for (int first = 0; first < lists.runs; first += kListThreads) {
    const int index = first + threadIdx.x;
    const Run run(p, lists, index);
    const int queries = index < lists.runs && !is_merged(index) ? run.queries : 0;
    int before, total;
    Scan(s_scan).ExclusiveSum(is_merged(index) << kShift | queries, before, total);
    if (is_merged(index)) lists.items[next_run + (before >> kShift)] = ~run.first_item(p);
    int* g_items = lists.items + next_query + before % (1 << kShift);
    for (int query = 0; query < queries; ++query) g_items[query] = run.first_item(p) + query * p.groups;
    next_run += total >> kShift, next_query += total % (1 << kShift);
    __syncthreads();
  }
  if (threadIdx.x == 0) lists.item_counts[0] = merged, lists.item_counts[1] = next_query - merged;
}

}  // namespace dsa::merged_lists
