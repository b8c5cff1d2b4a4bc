// Runs that are too long to be held: columns arrive in steps, and what exceeds a guessed bar becomes a candidate.
#pragma once

#include "selector.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::topk_select {

// Pieces of each thread that so many entries of a CTA take.
template <class Shape>
__device__ __forceinline__ int pieces_for(int entries) {
  constexpr int kOfCta = Shape::kThreads * kPiece;
  return (entries + kOfCta - 1) / kOfCta;
}

// The columns of a run arrive a step at a time, one step ahead.
template <class T, class Storage>
struct Arrivals {
  using Shape = typename Storage::Shape;
  static constexpr int kColumns = kStep<Shape>, kStages = Storage::kStages;
  Storage& shared;
  const T* g_row;
  Run run;
  unsigned waits = 0;  // that are over

  __device__ __forceinline__ int slot() const { return waits % kStages; }
  // By one thread.
  __device__ __forceinline__ void copy(int step, int slot) const {
    const int columns = min(kColumns, (run.aligned_size() + kUnit - 1) / kUnit * kUnit - step);
    if (columns <= 0) return;
    sm90::arrive_and_expect(&shared.arrived[slot], columns * sizeof(T));
    sm90::bulk_load(shared.columns[slot], g_row + run.aligned_begin() + step, columns * sizeof(T),
                    &shared.arrived[slot]);
  }
  __device__ __forceinline__ void copy_first() const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy(i * kColumns, (waits + i) % kStages);
  }
  // Columns that do not belong to the run become NaN.
  __device__ __forceinline__ const T* wait(int step) const {
    T* columns = shared.columns[slot()];
    sm90::wait(&shared.arrived[slot()], waits / kStages % 2);
    const int first = run.aligned_begin() + step;
    if (!run.contains(first, kColumns)) {
      for (int i = threadIdx.x; i < kColumns; i += Shape::kThreads) {
        if (!run.contains(first + i, 1)) columns[i] = T(NAN);
      }
      sm90::fence_async_proxy();
      __syncthreads();
    }
    return columns;
  }
};

// A sample of a run, in spots all over it that memory reads as quickly as a lone column. Sampled entries form groups,
// each of entries that are far from each other, in no regular way: the best of a group stand for all.
template <class T, class Shape>
struct Sample {
  static constexpr int kEntries = 4096, kSpotPieces = 4, kSpots = kEntries / (kSpotPieces * kPiece);
  static constexpr int kOfGroup = kEntries / (Shape::kThreads * kPiece), kGroups = kEntries / kOfGroup;
  Piece pieces[kOfGroup];

  __device__ __forceinline__ Sample(const T* g_row, Run run) {
    constexpr int kSpotColumns = kSpotPieces * kPiece;
    const int thread = threadIdx.x;
    const uint64_t run_spots = run.aligned_size() / kSpotColumns;
#pragma unroll
    for (int i = 0; i < kOfGroup; ++i) {
      const int mixed = thread / kSpotPieces * (1 + 36 * i) % (Shape::kThreads / kSpotPieces);
      const int spot = static_cast<int>((mixed * kOfGroup + i) * run_spots / kSpots);
      pieces[i] = load_piece(g_row + run.aligned_begin() + spot * kSpotColumns + thread % kSpotPieces * kPiece);
    }
  }
  // Of the best of a group; a thread has kPiece groups.
  __device__ __forceinline__ unsigned key(int group) const {
    float best = -INFINITY;
#pragma unroll
    for (const Piece& piece : pieces) best = fmaxf(best, piece.values[group]);
    return key_of(best);
  }
};

// The candidates of one CTA.
template <class T, class Storage>
struct Filter {
  using Shape = typename Storage::Shape;
  using Keys = typename Selector<Storage>::Keys;
  static constexpr int kPieces = Shape::kPieces;
  static constexpr Start kWhole = Selector<Storage>::kWhole;
  Selector<Storage>& selector;
  Arrivals<T, Storage>& arrivals;
  int topk;
  int step = 0, count = 0;
  float bar = -INFINITY;
  unsigned low = 0;  // that no candidate's key is below, or 0 where there is no guess

  // A bar that about topk entries exceed, with three standard deviations to spare.
  __device__ __forceinline__ void guess(const Sample<T, Shape>& sample) {
    constexpr float kGroups = sample.kGroups;
    float out = 1 - __fdividef(static_cast<float>(topk), static_cast<float>(arrivals.run.aligned_size()));
    static_assert(sample.kOfGroup == 2 || sample.kOfGroup == 4);
    out *= out;
    if constexpr (sample.kOfGroup == 4) out *= out;  // of groups, those that have none above
    const float expected = kGroups * (1 - out), variance = expected * out;
    const float wanted = expected + 3 * variance * rsqrtf(fmaxf(variance, 1e-6f)) + 3;
    if (!(wanted < kGroups - 8)) return;
    unsigned keys[kPiece], highest = 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      keys[i] = sample.key(i);
      highest = max(highest, keys[i]);
    }
    highest = __reduce_max_sync(~0u, highest);
    if (threadIdx.x % 32 == 0) selector.shared.warp_maxima[threadIdx.x / 32] = highest;
    const Selection selection = selector.find(keys, 1, static_cast<unsigned>(wanted), 1, kWhole, kGroups / 128);
    const unsigned last_out = selection.bar - (selection.ties > 0);
    if (last_out == 0) return;
    bar = bar_of(last_out);
    low = last_out + 1;
  }

  // Reads until there is no room for a step's candidates, or to the end. Returns whether it has come there.
  __device__ __forceinline__ bool read() {
    constexpr int kEntries = kStepPieces * kPiece;
    constexpr float kBase = 1 << 23;  // of floats whose last bits count
    const int size = arrivals.run.aligned_size();
    const uint32_t to_values = sm90::shared_address(selector.shared.entries.values);
    const uint32_t to_ids = sm90::shared_address(selector.shared.entries.ids);
    const int thread = threadIdx.x;
    while (step < size) {
      const T* columns = arrivals.wait(step) + thread * kEntries;
      Piece pieces[kStepPieces];
#pragma unroll
      for (int i = 0; i < kStepPieces; ++i) pieces[i] = load_piece(columns + i * kPiece);
      float before[kEntries + 1];
      before[0] = kBase;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        before[i + 1] = before[i] + one_if_greater(pieces[i / kPiece].values[i % kPiece], bar);
      }
      const unsigned above = __float_as_uint(before[kEntries]) - __float_as_uint(kBase);
      const uint2 sums = selector.sum_warps(__reduce_add_sync(~0u, above));
      if (count + sums.y > Shape::kHeld) return false;
      // All have read.
      if (thread == 0) arrivals.copy(step + Storage::kStages * kStep<Shape>, arrivals.slot());
      const int first = arrivals.run.aligned_begin() + step + thread * kEntries;
      const unsigned place = count + sums.x + sum_to_lane(above) - above - __float_as_uint(kBase);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const float value = pieces[i / kPiece].values[i % kPiece];
        if (value > bar) {
          const unsigned at = place + __float_as_uint(before[i]);
          store_shared(to_values + at * unsigned{sizeof(T)}, T(value));
          store_shared(to_ids + at * unsigned{sizeof(int)}, first + i);
        }
      }
      count += sums.y;
      step += kStep<Shape>;
      ++arrivals.waits;
    }
    return true;
  }

  // Forgets candidates and guess.
  __device__ __forceinline__ void restart() {
    step = count = low = 0;
    bar = -INFINITY;
    if (threadIdx.x == 0) arrivals.copy_first();
  }

  __device__ __forceinline__ void load_keys(Keys& keys, int pieces) const {
    const int first = held_place(pieces);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      const int place = first + piece * kWarpPiece;
      const Piece r = load_piece(selector.shared.entries.values + place);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) keys[piece * kPiece + i] = place + i < count ? key_of(r.values[i]) : 0;
    }
  }

  // Where the search for the last key begins: with digits from the bar to the best of the sample, if those leave out 0.
  __device__ __forceinline__ Start start_of_search(int ctas) const {
    if (ctas > 1 || low == 0) return kWhole;
    const int lane = thread_index() % 32;
    const unsigned highest = __reduce_max_sync(~0u, lane < Shape::kWarps ? selector.shared.warp_maxima[lane] : 0);
    const int shift = max(0, 32 - __clz(highest - low) - Shape::kDigitBits);
    if ((0 - low) >> shift < Shape::kBins) return kWhole;
    return {.low = low, .keys = static_cast<unsigned>(count), .shift = shift};
  }
};

}  // namespace dsa::topk_select
