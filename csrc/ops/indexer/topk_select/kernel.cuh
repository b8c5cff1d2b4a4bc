// Exact top-k of rows of logits, in id order, by radix select.
//
// No warp specialization: all warps of a CTA do the same. A cluster of CTAs takes one row, and each CTA a run of its
// columns:
//
//   sample   guess a threshold that the selected entries will exceed
//   filter   every entry above the threshold becomes a candidate, in id order
//   cut      when there is no room for more candidates, keep the best topk and raise the threshold to the last of them
//   select   write the best topk of all CTAs' candidates
//
// The first CTA of a cluster selects alone, if it has room for the candidates of all; else all CTAs do together.
//
// Ids only grow, so an entry equal to the threshold of topk better candidates is not selected. If the guess leaves
// fewer than topk candidates, the row is filtered again without one. A row that CTAs hold in registers skips
// the first three steps.
//
// Entries are compared as unsigned integers, their keys. A selection finds its last key digit by digit, from the top,
// with a histogram per digit.
//
// Programmatic dependent launch (PDL): waits for the preceding kernel before the first load.
#pragma once

#include "filter.cuh"
#include "params.h"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::topk_select {

struct KernelParams : Params {
  int ctas;  // per row
};

// The slot that holds token `id` of a sequence, or -1.
__device__ __forceinline__ int slot_of(const PageTable& table, int sequence, int id) {
  const int page = id / table.page_size;
  if (static_cast<unsigned>(sequence) >= static_cast<unsigned>(table.sequences) || page >= table.pages) return -1;
  const int entry = table.entries[sequence * table.stride_sequence + page * table.stride_page];
  const int64_t slot = int64_t{entry} * table.page_size + (id - page * table.page_size);
  return entry >= 0 && slot <= INT_MAX ? static_cast<int>(slot) : -1;
}

// Replaces the ids of a row, `count` shared entries, by slots.
template <class Shape>
__device__ __forceinline__ void make_slots(const PageTable& table, int row, int* ids, int count) {
  __syncthreads();
  const int sequence =
      table.row_to_sequence == nullptr ? row / table.rows_per_sequence : table.row_to_sequence[row * table.stride_row];
  for (int i = threadIdx.x; i < count; i += Shape::kThreads) ids[i] = slot_of(table, sequence, ids[i]);
}

// Writes the share of a row's results that one of `ctas` CTAs has: the first `kept` shared entries.
template <class T, bool kSlots, class Storage>
__device__ __forceinline__ void write_row(const Params& p, Selector<Storage>& selector, int row, int kept, int ctas) {
  using Shape = typename Storage::Shape;
  if constexpr (kSlots) make_slots<Shape>(p.table, row, selector.shared.entries.ids, kept);
  const uint2 sums = selector.sum_ctas(kept, ctas);
  const int64_t row_place = static_cast<int64_t>(row) * p.topk;
  int* g_indices = p.indices + row_place;
  T* g_values = static_cast<T*>(p.values) + row_place;
  const int* ids = selector.shared.entries.ids;
  const T* values = selector.shared.entries.values;
  sm90::fence_async_proxy();
  __syncthreads();
  const auto starts_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (starts_aligned(g_indices + sums.x) && starts_aligned(g_values + sums.x) && kept % kUnit == 0) {
    if constexpr (Shape::kIsLone) {  // latency counts
      for (int i = threadIdx.x * kPiece; i < kept; i += Shape::kThreads * kPiece) {
        using Values = std::conditional_t<sizeof(T) == 4, float4, float2>;
        *reinterpret_cast<int4*>(g_indices + sums.x + i) = *reinterpret_cast<const int4*>(ids + i);
        *reinterpret_cast<Values*>(g_values + sums.x + i) = *reinterpret_cast<const Values*>(values + i);
      }
    } else if (threadIdx.x == 0 && kept > 0) {
      sm90::bulk_store(g_indices + sums.x, ids, kept * sizeof(int));
      sm90::bulk_store(g_values + sums.x, values, kept * sizeof(T));
      sm90::tma_store_commit();
    }
  } else {
    for (int i = threadIdx.x; i < kept; i += Shape::kThreads) {
      g_indices[sums.x + i] = ids[i];
      g_values[sums.x + i] = values[i];
    }
  }
  if (cluster_rank() == 0) {
    for (int i = sums.y + threadIdx.x; i < p.topk; i += Shape::kThreads) {
      g_indices[i] = -1;
      g_values[i] = T(-INFINITY);
    }
  }
  if (threadIdx.x == 0) sm90::tma_store_wait_read();
}

// The run of CTA `rank` if `ctas` CTAs share a row; runs meet at multiples of a unit.
template <class T>
__device__ __forceinline__ Run run_of(const Params& p, const T* g_row, int row, int rank, int ctas) {
  const int window_begin = min(p.columns, max(0, p.starts[row * p.starts_stride]));
  const int window_end = max(window_begin, min(p.columns, p.ends[row * p.ends_stride]));
  // Columns between the last 16-byte boundary before the row and its first column.
  const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(g_row) % 16 / sizeof(T));
  const int first = (window_begin + ahead) / kUnit * kUnit - ahead;
  const int units = (window_end - first + kUnit - 1) / kUnit;
  const int run_units = (units + ctas - 1) / ctas;
  const int first_read = first + rank * run_units * kUnit;
  return {max(window_begin, first_read), min(window_end, first_read + run_units * kUnit), first_read, p.columns};
}

__device__ __forceinline__ bool is_wanted(const Params& p, int row) {
  return p.wanted == nullptr || p.wanted[row] != 0;
}

// For runs that fit into a CTA's registers.
template <class T, class Shape, bool kSlots>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    held_topk_select_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kPieces = Shape::kPieces, kKeys = Shape::kKeys;
  extern __shared__ __align__(128) char shared_bytes_[];
  using Storage = HeldStorage<T, Shape>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes_);
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();
  const int row = cluster_index();
  if (!is_wanted(p, row)) return;
  const T* g_row = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const Run run = run_of(p, g_row, row, cluster_rank(), p.ctas);
  const int pieces = pieces_for<Shape>(run.size());
  const int first = run.first_read + held_place(pieces);
  Piece r[kPieces];
#pragma unroll
  for (Piece& piece : r) leave_undefined(piece);
  const bool all_inside = run.contains(run.first_read, pieces * Shape::kThreads * kPiece);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece >= pieces || !all_inside) break;
    r[piece] = load_piece(g_row + first + piece * kWarpPiece);
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece >= pieces || all_inside) break;
    const int column = first + piece * kWarpPiece;
    if (run.contains(column, kPiece)) {
      r[piece] = load_piece(g_row + column);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        r[piece].values[i] = run.contains(column + i, 1) ? static_cast<float>(g_row[column + i]) : NAN;
      }
    }
  }
  Selector<Storage> selector{shared};
  selector.clear(shared.histograms[0]);
  __syncthreads();
  unsigned keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) keys[i] = key_of(r[i / kPiece].values[i % kPiece]);
  const Selection selection = selector.find(keys, pieces, p.topk, p.ctas, selector.kWhole);
  const unsigned bits = selector.kept_bits(keys, pieces, selection, p.ctas);
  const int kept = selector.keep(
      bits, pieces, [&](int i) { return T(value_of(keys[i])); },
      [&](int i) { return first + i / kPiece * kWarpPiece + i % kPiece; });
  if (selection.threshold <= kZeroKey) {
    // Keys have lost the sign of zeros.
    __syncthreads();
    T* values = shared.entries.values;
    for (int i = threadIdx.x; i < kept; i += Shape::kThreads) {
      if (values[i] == T(0.f)) values[i] = g_row[shared.entries.ids[i]];
    }
  }
  write_row<T, kSlots>(p, selector, row, kept, p.ctas);
}

template <class T, class Shape, bool kSlots>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    filter_topk_select_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(128) char shared_bytes_[];
  using Storage = FilterStorage<T, Shape>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes_);
  if (p.ctas > 1) sm90::cluster_arrive_relaxed();
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();
  const int row = cluster_index();
  if (!is_wanted(p, row)) {
    if (p.ctas > 1) sm90::cluster_wait();
    return;
  }
  const T* g_row = static_cast<const T*>(p.logits) + row * p.logits_stride;
  Selector<Storage> selector{shared};
  Filter<T, Storage> filter{selector, g_row, run_of(p, g_row, row, cluster_rank(), p.ctas), p.topk};
  // All CTAs of a cluster sample the whole row, so that they make the same guess.
  const Run window = run_of(p, g_row, row, 0, 1);
  const bool guesses = window.size() > Shape::kHeld;
  Sample<T, Shape> sample(window.size());
  if (guesses) {
    sample.load(g_row, window);
    filter.start(0, filter.log_chunks());
  }
  selector.clear(shared.histograms[0]);
  if (threadIdx.x == 0) shared.full = 0;
  __syncthreads();
  if (guesses) filter.guess(sample, window.size());
  if (p.ctas > 1) sm90::cluster_wait();  // now other CTAs' shared memory may be written
  for (bool read_all = guesses && filter.read_apart();;) {
    if (!read_all) read_all = filter.read();
    __syncthreads();
    int ctas = 1;
    if (read_all) {
      const uint2 sums = selector.sum_ctas(filter.count, p.ctas);
      const int all = static_cast<int>(sums.y);
      if (filter.low > 0 && all < p.topk) {
        filter.forget_guess();
        read_all = false;
        continue;
      }
      if (all > Shape::kHeld) {
        ctas = p.ctas;
      } else if (p.ctas > 1) {
        filter.gather(sums);
        if (cluster_rank() > 0) return;
      }
    }
    // Keep the best topk: as results, or to make room.
    const int pieces = pieces_for<Shape>(filter.count);
    typename Selector<Storage>::Keys keys;
#pragma unroll
    for (unsigned& key : keys) leave_undefined(key);
    filter.load_keys(keys, pieces);
    const Start start = selector.start_from(ctas > 1 ? 0 : filter.low, filter.count);
    const Selection selection = selector.find(keys, pieces, p.topk, ctas, start);
    const unsigned bits = selector.kept_bits(keys, pieces, selection, ctas);
    filter.count = selector.keep_in_place(bits, pieces);
    if (read_all) {
      write_row<T, kSlots>(p, selector, row, filter.count, ctas);
      break;
    }
    filter.threshold = threshold_of(selection.threshold);
  }
}

}  // namespace dsa::topk_select
