// Exact top-k of rows of logits, in id order, by radix select.
//
// No warp specialization: all warps of a CTA take each step together. A cluster of CTAs takes one row, and each CTA a
// run of its columns:
//
//   sample   guess a threshold that the selected entries will exceed
//   filter   every entry above the threshold becomes a candidate, in id order
//   cut      when there is no room for more candidates, keep the best topk and raise the threshold to the last of them
//   select   write the best topk of all CTAs' candidates
//
// Ids only grow, so an entry equal to the threshold of topk better candidates is not selected. If the guess leaves
// fewer than topk candidates, the row is filtered again without one. A run that fits into registers skips the first
// three steps.
//
// Entries are compared as unsigned integers, their keys. A selection finds its last key digit by digit, from the top,
// with a histogram per digit.
#pragma once

#include "filter.cuh"
#include "params.h"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::topk_select {

// Writes a CTA's share of its row's results: the first `kept` shared entries.
template <class T, class Storage>
__device__ __forceinline__ void write_row(const Params& p, Selector<Storage>& selector, int row, int kept) {
  using Shape = typename Storage::Shape;
  const uint2 sums = selector.sum_ctas(kept, p.ctas);
  const int64_t row_place = static_cast<int64_t>(row) * p.topk;
  int* g_indices = p.indices + row_place;
  T* g_values = static_cast<T*>(p.values) + row_place;
  const int* ids = selector.shared.entries.ids;
  const T* values = selector.shared.entries.values;
  sm90::fence_async_proxy();
  __syncthreads();
  const auto starts_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (starts_aligned(g_indices + sums.x) && starts_aligned(g_values + sums.x) && kept % kUnit == 0) {
    if (threadIdx.x == 0 && kept > 0) {
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

// This CTA's run; runs meet at multiples of a unit.
template <class T>
__device__ __forceinline__ Run run_of_cta(const Params& p, const T* g_row, int2 window) {
  const int rank = cluster_rank(), window_begin = window.x, window_end = window.y;
  // Columns between the last 16-byte boundary before the row and its first column.
  const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(g_row) % 16 / sizeof(T));
  const int first = (window_begin + ahead) / kUnit * kUnit - ahead;
  const int units = (window_end - first + kUnit - 1) / kUnit;
  const int run_units = (units + p.ctas - 1) / p.ctas;
  const int first_read = first + rank * run_units * kUnit;
  return {max(window_begin, first_read), min(window_end, first_read + run_units * kUnit), first_read, p.columns};
}

// The columns that a row selects among: its begin, and its end, which is not less. Waits for the logits.
__device__ __forceinline__ int2 window_of(const Params& p, int row) {
  const int begin = min(p.columns, max(0, p.starts[row * p.starts_stride]));
  const int2 window{begin, max(begin, min(p.columns, p.ends[row * p.ends_stride]))};
  sm90::wait_for_preceding_kernel();
  return window;
}

// For runs that fit into a CTA's registers.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    held_topk_select_kernel(const __grid_constant__ Params p) {
  constexpr int kPieces = Shape::kPieces, kKeys = Shape::kKeys;
  extern __shared__ __align__(128) char shared_bytes_[];
  using Storage = HeldStorage<T, Shape>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes_);
  const int row = cluster_index();
  const T* g_row = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const int2 window = window_of(p, row);
  if (p.skips_empty && window.x == window.y) return;
  const Run run = run_of_cta(p, g_row, window);
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
  for (int i = 0; i < kKeys; ++i) {
    if (i / kPiece >= pieces || all_inside) break;
    const int column = first + i / kPiece * kWarpPiece + i % kPiece;
    r[i / kPiece].values[i % kPiece] = run.contains(column, 1) ? static_cast<float>(g_row[column]) : NAN;
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
  write_row<T>(p, selector, row, kept);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    filter_topk_select_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared_bytes_[];
  using Storage = FilterStorage<T, Shape>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes_);
  const int row = cluster_index();
  const T* g_row = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const int2 window = window_of(p, row);
  if (p.skips_empty && window.x == window.y) return;
  Selector<Storage> selector{shared};
  Filter<T, Storage> filter{selector, g_row, run_of_cta(p, g_row, window), p.topk};
  const bool guesses = filter.run.size() > Shape::kHeld;
  Sample<T, Shape> sample;
  for (Piece& piece : sample.pieces) leave_undefined(piece);
  if (guesses) sample.load(g_row, filter.run);
  Selector<Storage>::clear(shared.histograms[0]);
  if (threadIdx.x == 0) shared.full = 0;
  __syncthreads();
  if (guesses) filter.guess(sample);
  for (bool read_all = filter.read_apart();;) {
    if (!read_all) read_all = filter.read();
    __syncthreads();
    if (read_all && filter.low > 0 && filter.count < p.topk) {
      filter.forget_guess();
      read_all = false;
      continue;
    }
    // Keep the best topk: as results, or to make room.
    const int ctas = read_all ? p.ctas : 1;
    const int pieces = pieces_for<Shape>(filter.count);
    typename Selector<Storage>::Keys keys;
#pragma unroll
    for (unsigned& key : keys) leave_undefined(key);
    filter.load_keys(keys, pieces);
    const Selection selection = selector.find(keys, pieces, p.topk, ctas, filter.start_of_search(ctas));
    const unsigned bits = selector.kept_bits(keys, pieces, selection, ctas);
    filter.count = selector.keep_in_place(bits, pieces);
    if (read_all) break;
    filter.threshold = threshold_of(selection.threshold);
  }
  write_row<T>(p, selector, row, filter.count);
}

}  // namespace dsa::topk_select
