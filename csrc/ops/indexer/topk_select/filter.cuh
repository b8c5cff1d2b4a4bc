// Runs that are too long for registers: entries above a guessed threshold become candidates.
#pragma once

#include "selector.cuh"

namespace dsa::topk_select {

// Pieces per thread that `entries` entries of a CTA take.
template <class Shape>
__device__ __forceinline__ int pieces_for(int entries) {
  constexpr int kEntriesPerCta = Shape::kThreads * kPiece;
  return (entries + kEntriesPerCta - 1) / kEntriesPerCta;
}

// A sample of a row: short spots all over it, which memory reads as fast as single columns. Sampled entries form groups
// of entries that are irregularly far from each other; the best of a group represents it.
template <class T, class Shape>
struct Sample {
  static constexpr int kEntries = 4096, kSpotPieces = 4, kSpots = kEntries / (kSpotPieces * kPiece);
  static constexpr int kEntriesPerGroup = kEntries / (Shape::kThreads * kPiece), kGroups = kEntries / kEntriesPerGroup;
  Piece pieces[kEntriesPerGroup];

  __device__ __forceinline__ void load(const T* g_row, Run run) {
    constexpr int kSpotColumns = kSpotPieces * kPiece;
    const int thread = threadIdx.x;
    const uint64_t run_spots = run.size() / kSpotColumns;
#pragma unroll
    for (int i = 0; i < kEntriesPerGroup; ++i) {
      const int mixed = thread / kSpotPieces * (1 + 36 * i) % (Shape::kThreads / kSpotPieces);
      const int spot = static_cast<int>((mixed * kEntriesPerGroup + i) * run_spots / kSpots);
      pieces[i] = load_piece(g_row + run.first_read + spot * kSpotColumns + thread % kSpotPieces * kPiece);
    }
  }
  // The key of the best of a group; a thread has kPiece groups.
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
  const T* g_row;
  Run run;
  int topk;
  int step = 0, count = 0;
  float threshold = -INFINITY;
  unsigned low = 0;  // no candidate's key is below it; 0 without a guess

  // Guesses a threshold that about topk of the row's `size` entries exceed, with a margin of three standard deviations.
  __device__ __forceinline__ void guess(const Sample<T, Shape>& sample, int size) {
    constexpr float kGroups = sample.kGroups;
    float out = 1 - __fdividef(static_cast<float>(topk), static_cast<float>(size));
    static_assert(sample.kEntriesPerGroup == 2 || sample.kEntriesPerGroup == 4);
    out *= out;
    if constexpr (sample.kEntriesPerGroup == 4) out *= out;  // the share of groups without an entry above
    const float expected = kGroups * (1 - out), variance = expected * out;
    const float wanted = expected + 3 * variance * rsqrtf(fmaxf(variance, 1e-6f)) + 3;
    if (!(wanted < kGroups - 8)) return;
    unsigned keys[kPiece], highest = 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      keys[i] = sample.key(i);
      highest = max(highest, keys[i]);
    }
    selector.set_maximum(highest);
    const Selection selection = selector.find(keys, 1, static_cast<unsigned>(wanted), 1, kWhole, kGroups / 128);
    const unsigned last_out = selection.threshold - (selection.ties > 0);
    if (last_out == 0) return;
    threshold = threshold_of(last_out);
    low = last_out + 1;
  }

  // Which of consecutive entries exceed the threshold: the count before each, and in total.
  template <int kEntries>
  struct Above {
    static constexpr float kBase = 1 << 23;  // floats from here on count in their last bits
    float before[kEntries + 1];

    __device__ __forceinline__ Above(const Piece* pieces, float threshold) {
      before[0] = kBase;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        before[i + 1] = before[i] + one_if_greater(pieces[i / kPiece].values[i % kPiece], threshold);
      }
    }
    __device__ __forceinline__ unsigned operator[](int i) const {
      return __float_as_uint(before[i]) - __float_as_uint(kBase);
    }
    __device__ __forceinline__ unsigned all() const { return (*this)[kEntries]; }
  };

  // Keeps the entries from column `column` on that lie in the run; the others become NaN. Columns after the row's last
  // whole piece are read here one by one: nothing after the row is read.
  __device__ __forceinline__ void keep_inside(Piece& r, int column) const {
    const bool is_after_pieces = column >= run.pieces_end();
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const bool inside = run.contains(column + i, 1);
      if (inside && is_after_pieces) r.values[i] = static_cast<float>(g_row[column + i]);
      if (!inside) r.values[i] = NAN;
    }
  }
  __device__ __forceinline__ Piece load_inside(int column) const {
    Piece r = load_piece(g_row + min(column, run.pieces_end() - kPiece));
    keep_inside(r, column);
    return r;
  }

  // What a warp loads at a time.
  struct Load {
    Piece of[2];
  };
  static constexpr int kLoadColumns = 2 * kWarpPiece, kLogLoadColumns = 8;
  static_assert(1 << kLogLoadColumns == kLoadColumns);
  using Lists = typename Storage::Lists;

  // Stretches are of 1 << log_loads() loads: long enough that there are at most kStretches.
  __device__ __forceinline__ int log_loads() const {
    return max(0, 32 - __clz((run.size() - 1) / (kLoadColumns * Lists::kStretches)));
  }
  // The first column of a warp's load: the warps read stretches in turn. `log`: log_loads().
  __device__ __forceinline__ int column_of(int load, int log) const {
    const int stretch = (load >> log) * Shape::kWarps + static_cast<int>(threadIdx.x / 32);
    return run.first_read + (stretch << log + kLogLoadColumns) + (load & (1 << log) - 1) * kLoadColumns;
  }
  // `last`: where the last whole piece is.
  __device__ __forceinline__ Load load_from(int column, int last) const {
    const int first = column + static_cast<int>(threadIdx.x % 32) * kPiece;
    return {load_piece(g_row + min(first, last)), load_piece(g_row + min(first + kWarpPiece, last))};
  }

  // Starts the warp's loads from `load` on.
  __device__ __forceinline__ void read_ahead(Load (&next)[kReadAhead], int load = 0) const {
#pragma unroll
    for (int i = 0; i < kReadAhead; ++i)
      next[i] = load_from(column_of(load + i, log_loads()), run.pieces_end() - kPiece);
  }

  // The warps read stretches in turn, each into its own list; `next`: what they have read ahead. Returns false if a
  // list has no room left; otherwise gathers the candidates in id order.
  __device__ __forceinline__ bool read_apart(Load (&next)[kReadAhead]) {
    static_assert(Lists::kStretches % Shape::kThreads == 0);
    Storage& shared = selector.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = run.first_read;
    const int log = log_loads(), loads = 1 << log, log_stretch = log + kLogLoadColumns;
    const uint32_t list = sm90::shared_address(shared.lists.entries[warp]);
    unsigned listed = 0;
    bool full = false;
    for (int load = 0; column_of(load, log) < run.end && !full; load += kReadAhead) {
      Load now[kReadAhead];
#pragma unroll
      for (int i = 0; i < kReadAhead; ++i) now[i] = next[i];
      // With more CTAs on an SM there are no registers for `now` and `next` at once: there the next loads come last.
      if constexpr (Shape::kCtasPerSm == 1) read_ahead(next, load + kReadAhead);
      int firsts[kReadAhead];  // columns
#pragma unroll
      for (int i = 0; i < kReadAhead; ++i) {
        const int column = column_of(load + i, log);
        firsts[i] = column + lane * kPiece;
        if (!run.contains(column, kLoadColumns)) {
#pragma unroll
          for (int j = 0; j < 2; ++j) keep_inside(now[i].of[j], firsts[i] + j * kWarpPiece);
        }
      }
      // Candidates are counted in bytes, one for each of a lane's four pieces: up to 4 in a lane, and 128 in a warp.
      static_assert(kReadAhead == 2);
      const Above<kPiece> above[4] = {{&now[0].of[0], threshold},
                                      {&now[0].of[1], threshold},
                                      {&now[1].of[0], threshold},
                                      {&now[1].of[1], threshold}};
      const unsigned lane_counts = above[0].all() | above[1].all() << 8 | above[2].all() << 16 | above[3].all() << 24;
      const unsigned to_lane = sum_to_lane(lane_counts), warp_counts = __shfl_sync(~0u, to_lane, 31);
      const unsigned before = to_lane - lane_counts;
      const unsigned listed_first = __dp4a(warp_counts, 0x0101u, listed);  // with those of the first load
      const unsigned places[4] = {
          __dp4a(before, 0x01u, listed),
          __dp4a(before, 0x0100u, __dp4a(warp_counts, 0x01u, listed)),
          __dp4a(before, 0x010000u, listed_first),
          __dp4a(before, 0x01000000u, __dp4a(warp_counts, 0x010000u, listed_first)),
      };
#pragma unroll
      for (int i = 0; i < kReadAhead; ++i) {
        if (lane == 0 && (load + i & loads - 1) == 0) {
          shared.firsts[((load + i) >> log) * Shape::kWarps + warp] = i == 0 ? listed : listed_first;
        }
      }
      listed = __dp4a(warp_counts, 0x01010000u, listed_first);
      full = listed > Lists::kSize;
      if (full) {
        shared.full = 1;
      } else {
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
            const float value = now[piece / 2].of[piece % 2].values[e];
            if (value > threshold) {
              store_shared(list + (places[piece] + above[piece][e]) * unsigned{sizeof(uint2)},
                           make_uint2(__float_as_uint(value), firsts[piece / 2] + piece % 2 * kWarpPiece + e));
            }
          }
        }
      }
      if constexpr (Shape::kCtasPerSm > 1) read_ahead(next, load + kReadAhead);
      full = __any_sync(~0u, full || *static_cast<volatile int*>(&shared.full) != 0);
    }
    const int stretches = (run.size() + (1 << log_stretch) - 1) >> log_stretch;
    if (lane == 0) {
      const int last_round = (stretches - warp + Shape::kWarps - 1) / Shape::kWarps;
      shared.firsts[last_round * Shape::kWarps + warp] = listed;
    }
    __syncthreads();
    if (shared.full) return false;

    // For each stretch, the offset from its candidates' positions in their list to those among all candidates.
    constexpr int kStretchesPerThread = Lists::kStretches / Shape::kThreads;
    unsigned firsts[kStretchesPerThread], counts[kStretchesPerThread], thread_count = 0;
#pragma unroll
    for (int i = 0; i < kStretchesPerThread; ++i) {
      const int stretch = threadIdx.x * kStretchesPerThread + i;
      firsts[i] = shared.firsts[stretch];
      counts[i] = stretch < stretches ? shared.firsts[stretch + Shape::kWarps] - firsts[i] : 0;
      thread_count += counts[i];
    }
    const unsigned to_lane = sum_to_lane(thread_count);
    const uint2 sums = selector.sum_warps(__shfl_sync(~0u, to_lane, 31));
    unsigned place = sums.x + to_lane - thread_count;
#pragma unroll
    for (int i = 0; i < kStretchesPerThread; ++i) {
      shared.firsts[threadIdx.x * kStretchesPerThread + i] = place - firsts[i];
      place += counts[i];
    }
    constexpr int kEntriesPerLane = Lists::kSize / 32;
    uint2 entries[kEntriesPerLane];
#pragma unroll
    for (uint2& entry : entries) leave_undefined(entry.x), leave_undefined(entry.y);
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      if (i * 32 >= listed) break;
      entries[i] = shared.lists.entries[warp][i * 32 + lane];
    }
    __syncthreads();
    const uint32_t to_values = sm90::shared_address(shared.entries.values);
    const uint32_t to_ids = sm90::shared_address(shared.entries.ids);
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      const unsigned in_list = i * 32 + lane;
      if (in_list < listed) {
        const int id = static_cast<int>(entries[i].y);
        const unsigned at = shared.firsts[(id - begin) >> log_stretch] + in_list & 0xffff;
        store_shared(to_values + at * unsigned{sizeof(T)}, T(__uint_as_float(entries[i].x)));
        store_shared(to_ids + at * unsigned{sizeof(int)}, id);
      }
    }
    count = sums.y;
    return true;
  }

  // All warps read together in id order, until a step's candidates do not fit, or to the end. Returns whether they have
  // reached the end.
  __device__ __forceinline__ bool read() {
    constexpr int kEntries = kStepPieces * kPiece;
    const uint32_t to_values = sm90::shared_address(selector.shared.entries.values);
    const uint32_t to_ids = sm90::shared_address(selector.shared.entries.ids);
    for (; step < run.size(); step += kStep<Shape>) {
      const int first = run.first_read + step + threadIdx.x * kEntries;
      Piece pieces[kStepPieces];
#pragma unroll
      for (int i = 0; i < kStepPieces; ++i) pieces[i] = load_inside(first + i * kPiece);
      const Above<kEntries> above(pieces, threshold);
      const unsigned to_lane = sum_to_lane(above.all());
      const uint2 sums = selector.sum_warps(__shfl_sync(~0u, to_lane, 31));
      if (count + sums.y > Shape::kHeld) return false;
      const unsigned place = count + sums.x + to_lane - above.all();
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const float value = pieces[i / kPiece].values[i % kPiece];
        if (value > threshold) {
          store_shared(to_values + (place + above[i]) * unsigned{sizeof(T)}, T(value));
          store_shared(to_ids + (place + above[i]) * unsigned{sizeof(int)}, first + i);
        }
      }
      count += sums.y;
    }
    return true;
  }

  // Moves the candidates of a cluster to its first CTA, in id order. `sums`: the candidates of earlier CTAs, and of
  // all.
  __device__ __forceinline__ void gather(uint2 sums) {
    auto cluster = cooperative_groups::this_cluster();
    auto& entries = selector.shared.entries;
    if (cluster_rank() > 0) {
      T* to_values = cluster.map_shared_rank(entries.values, 0) + sums.x;
      int* to_ids = cluster.map_shared_rank(entries.ids, 0) + sums.x;
      for (int i = threadIdx.x; i < count; i += Shape::kThreads) {
        to_values[i] = entries.values[i];
        to_ids[i] = entries.ids[i];
      }
    }
    count = sums.y;
    cluster.sync();
  }

  // Drops the guess and all candidates.
  __device__ __forceinline__ void forget_guess() {
    step = count = 0;
    low = 0;
    threshold = -INFINITY;
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
};

}  // namespace dsa::topk_select
