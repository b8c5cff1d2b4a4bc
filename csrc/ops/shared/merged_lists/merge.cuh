// Kernels that merge the lists of each run, and list the items of a launch.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "ops/shared/merged_lists/params.h"
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

struct List {
  const int* g_ids;
  int slots;
  tiles::VisibleIds ids;

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

inline constexpr int kKeyThreads = 256;

// One warp per 32 keys.
__global__ void __launch_bounds__(kKeyThreads)
    find_unfit_keys_kernel(const __grid_constant__ Problem p, const __grid_constant__ Operands operands) {
  const int lane = threadIdx.x % 32, words = static_cast<int>(words_of_keys(p.seq_kv));
  int index = (blockIdx.x * kKeyThreads + threadIdx.x) / 32;
  if (index >= p.batch * p.groups * words) return;
  unsigned* const g_unfit = operands.unfit_keys + index;
  const int first_key = index % words * 32;
  index /= words;
  const __nv_bfloat16* g_keys = static_cast<const __nv_bfloat16*>(p.kv) + index / p.groups * p.kv_stride_b +
                                index % p.groups * p.kv_stride_g + first_key * p.kv_stride_s;
  const unsigned pieces = p.d_qk / 8, keys = min(32, p.seq_kv - first_key);
  unsigned unfit = 0;
#pragma unroll 8
  for (unsigned i = lane; i < keys * pieces; i += 32) {
    const unsigned key = i / pieces;
    const auto* g_piece = reinterpret_cast<const uint4*>(g_keys + key * p.kv_stride_s) + i % pieces;
    unfit |= unsigned(is_unfit(__ldg(g_piece))) << key;
  }
  unfit = __reduce_or_sync(~0u, unfit);
  if (lane == 0) *g_unfit = unfit;
}

inline constexpr int kMergeThreads = 256;
inline constexpr int kWindowBytes = 40 * 1024;

// Words of a window of keys, each a bit per query.
constexpr int window_words(int queries, int64_t seq_kv) {
  return static_cast<int>(std::min<int64_t>(kWindowBytes / 4 / queries, words_of_keys(seq_kv)));
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

__device__ __forceinline__ bool has_unfit_operands(const Problem& p, const Run& run, const Operands& operands) {
  const int group_heads = p.heads / p.groups, first_head = run.group * group_heads, rows = run.queries * group_heads;
  const auto q_row = [&](int row) {
    return run.b * p.q_stride_b + (run.s + row / group_heads) * p.q_stride_s +
           (first_head + row % group_heads) * p.q_stride_h;
  };
  const auto dout_row = [&](int row) {
    const int64_t query = static_cast<int64_t>(run.b) * p.seq_q + run.s + row / group_heads;
    return (query * p.heads + first_head + row % group_heads) * operands.d_v;
  };
  return has_unfit_rows(p.q, rows, p.d_qk, q_row) || has_unfit_rows(operands.dout, rows, operands.d_v, dout_row);
}

// Sets the bits of the keys that a query lists, from `first_key` on. Returns whether this thread found a key again.
__device__ __forceinline__ bool set_bits(const List& list, int first_key, int words, unsigned* s_bits) {
  bool is_repeated = false;
#pragma unroll 4
  for (int slot = threadIdx.x; slot < list.slots; slot += kMergeThreads) {
    const int id = __ldg(list.g_ids + slot);
    const unsigned key = static_cast<unsigned>(id) - first_key, bit = 1u << key % 32;
    if (list.ids.has(id) && key / 32 < words) is_repeated |= (atomicOr(s_bits + key / 32, bit) & bit) != 0;
  }
  return is_repeated;
}

// The queries that list each of 32 keys.
template <int kQueries>
struct Word {
  unsigned own[kQueries], all = 0;

  __device__ __forceinline__ Word(const unsigned* s_bits, int words, int word) {
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      own[query] = s_bits[query * words + word];
      all |= own[query];
    }
  }
  __device__ __forceinline__ unsigned queries_of(int key) const {
    unsigned queries = 0;
#pragma unroll
    for (int query = 0; query < kQueries; ++query) queries |= (own[query] >> key & 1) << query;
    return queries;
  }
};

// One block per run. Keys are bits of words, in windows: one array per query.
template <int kQueries>
__global__ void __launch_bounds__(kMergeThreads)
    merge_lists_kernel(const __grid_constant__ Problem p, const __grid_constant__ Lists lists,
                       const __grid_constant__ Operands operands) {
  using Scan = cub::BlockScan<int, kMergeThreads>;
  extern __shared__ unsigned s_bits[];  // [kQueries, words]
  __shared__ typename Scan::TempStorage s_scan;
  const Run run(p, lists, blockIdx.x);
  const int words = window_words(kQueries, p.seq_kv);
  const int words_of_thread = (words + kMergeThreads - 1) / kMergeThreads | 1;  // odd: from as many banks as lanes
  const int begin = min(static_cast<int>(threadIdx.x) * words_of_thread, words);
  const int end = min(begin + words_of_thread, words);
  unsigned* const g_entries = lists.entries + static_cast<int64_t>(blockIdx.x) * lists.capacity;
  const unsigned* const g_unfit =
      operands.unfit_keys == nullptr
          ? nullptr
          : operands.unfit_keys + (static_cast<int64_t>(run.b) * p.groups + run.group) * words_of_keys(p.seq_kv);
  int64_t tiles = 0;
  for (int query = 0; query < run.queries; ++query) tiles += tiles_of_list(List(p, run, query).slots);
  const int64_t most = most_merged_tiles(tiles) * kTileKeys;

  int count = 0;
  bool is_merged = true;
  for (int first_key = 0; is_merged && first_key < p.seq_kv; first_key += words * 32) {
    for (int i = threadIdx.x; i < kQueries * words; i += kMergeThreads) s_bits[i] = 0;
    __syncthreads();
    bool obstacle = false;  // found by this thread
    for (int query = 0; query < run.queries; ++query)
      obstacle |= set_bits(List(p, run, query), first_key, words, s_bits + query * words);
    __syncthreads();
    int keys = 0;
    for (int i = begin; i < end; ++i) {
      const Word<kQueries> word(s_bits, words, i);
      keys += __popc(word.all);
      if (word.all != 0 && g_unfit != nullptr) obstacle |= (word.all & g_unfit[first_key / 32 + i]) != 0;
    }
    int at, total;
    Scan(s_scan).ExclusiveSum(keys, at, total);
    is_merged = !__syncthreads_or(obstacle || count + total > most);
    if (!is_merged) break;
    at += count;
    for (int i = begin; i < end; ++i) {
      const Word<kQueries> word(s_bits, words, i);
      for (unsigned left = word.all; left != 0; left &= left - 1) {
        const int key = __ffs(left) - 1;
        g_entries[at++] = unsigned(first_key + i * 32 + key) | word.queries_of(key) << kIdBits;
      }
    }
    count += total;
    __syncthreads();
  }
  if (is_merged && g_unfit != nullptr) is_merged = !__syncthreads_or(has_unfit_operands(p, run, operands));
  if (threadIdx.x == 0) lists.counts[blockIdx.x] = is_merged ? count : -1;
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
  if (threadIdx.x == 0) *lists.item_count = next_query;
}

}  // namespace dsa::merged_lists
