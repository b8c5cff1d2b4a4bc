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
// of two or four entries that are irregularly far from each other; the best of a group represents it.
template <class T, class Shape>
struct Sample {
  static constexpr int kGroups = Shape::kThreads * kPiece, kMaxEntries = 4096, kMaxPieces = kMaxEntries / kGroups;
  Piece pieces[kMaxPieces];  // of which a thread reads 1 << log_pieces
  int log_pieces;

  // `size`: of the row. What a short row's sample reads is a large part of the row, which is read again.
  __device__ __forceinline__ explicit Sample(int size) {
    log_pieces = kMaxPieces > 2 && size >= kLongRow ? 2 : 1;
    for (Piece& piece : pieces) leave_undefined(piece);
  }
  __device__ __forceinline__ void load(const T* g_row, Run run) {
    constexpr int kSpotPieces = 4, kSpotColumns = kSpotPieces * kPiece, kThreadSpots = Shape::kThreads / kSpotPieces;
    const int thread = threadIdx.x;
    const uint64_t run_spots = run.size() / kSpotColumns;
#pragma unroll
    for (int i = 0; i < kMaxPieces; ++i) {
      if (i >> log_pieces) break;
      const int mixed = thread / kSpotPieces * (1 + 36 * i) % kThreadSpots;
      const int spot = static_cast<int>(((mixed << log_pieces) + i) * run_spots / kThreadSpots >> log_pieces);
      pieces[i] = load_piece(g_row + run.first_read + spot * kSpotColumns + thread % kSpotPieces * kPiece);
    }
  }
  // The best of each group; a thread has kPiece groups.
  __device__ __forceinline__ Piece best() const {
    Piece best = pieces[0];
#pragma unroll
    for (int i = 1; i < kMaxPieces; ++i) {
      if (i >> log_pieces) break;
#pragma unroll
      for (int group = 0; group < kPiece; ++group) {
        best.values[group] = fmaxf(best.values[group], pieces[i].values[group]);
      }
    }
    return best;
  }
};

// The candidates of one CTA.
template <class T, class Storage>
struct Filter {
  using Shape = typename Storage::Shape;
  using Keys = typename Selector<Storage>::Keys;
  static constexpr int kPieces = Shape::kPieces;
  Selector<Storage>& selector;
  const T* g_row;
  Run run;
  int topk;
  int step = 0, count = 0;
  float threshold = -INFINITY;
  unsigned low = 0;  // no candidate's key is below it; 0 without a guess

  // Guesses a threshold that about topk of the row's `size` entries exceed, with a margin of three standard deviations.
  // With fewer above it, the row is read twice: the margin is four where a call waits for its slowest row (few rows).
  __device__ __forceinline__ void guess(const Sample<T, Shape>& sample, int size) {
    constexpr float kGroups = sample.kGroups;
    float out = 1 - __fdividef(static_cast<float>(topk), static_cast<float>(size));
    for (int i = 0; i < sample.log_pieces; ++i) out *= out;  // the share of groups without an entry above
    const float expected = kGroups * (1 - out), variance = expected * out;
    constexpr float kMargin = Shape::kIsLone ? 4 : 3;
    const float wanted = expected + kMargin * variance * rsqrtf(fmaxf(variance, 1e-6f)) + 3;
    if (!(wanted < kGroups - 8)) return;
    const Piece best = sample.best();
    unsigned keys[kPiece], highest = 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      keys[i] = key_of(best.values[i]);
      highest = max(highest, keys[i]);
    }
    selector.set_maximum(highest);
    const Selection selection =
        selector.find(keys, 1, static_cast<unsigned>(wanted), 1, selector.kWhole, kGroups / 128);
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
    const bool is_after_pieces = column >= run.whole_end(kPiece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const bool inside = run.contains(column + i, 1);
      if (inside && is_after_pieces) r.values[i] = static_cast<float>(g_row[column + i]);
      if (!inside) r.values[i] = NAN;
    }
  }
  __device__ __forceinline__ Piece load_inside(int column) const {
    Piece r = load_piece(g_row + min(column, run.whole_end(kPiece) - kPiece));
    keep_inside(r, column);
    return r;
  }

  using Lists = typename Storage::Lists;
  using Loads = typename Storage::Loads;
  static constexpr int kLaneColumns = Loads::kLaneColumns;
  // A lane appends candidates either from registers, with a test for each column, or from the slot, in a loop. The loop
  // takes as long as the lane with the most candidates: it is better the more columns a lane has and the fewer of them
  // are candidates. From registers, the slot is free for the next load before the candidates are known, which counts
  // where a warp has only one.
  static constexpr bool kFromRegisters = kLaneColumns <= 16 && Shape::kCtasPerSm > 1;

  // Stretches are of 1 << log_chunks() chunks: long enough that there are at most kStretches.
  __device__ __forceinline__ int log_chunks() const {
    return max(0, 32 - __clz((run.size() - 1) / (kChunk * Lists::kStretches)));
  }
  // The chunk that this lane reads in a load of its warp.
  static __device__ __forceinline__ int chunk_of(int load) {
    return load * Loads::kChunks + static_cast<int>(threadIdx.x % 32) / Loads::kLanesPerChunk;
  }
  // The first column of a chunk of the warp: the warps read stretches in turn. `log`: log_chunks().
  __device__ __forceinline__ int column_of(int chunk, int log) const {
    const int stretch = (chunk >> log) * Shape::kWarps + static_cast<int>(threadIdx.x / 32);
    return run.first_read + (stretch << log + kLogChunk) + (chunk & (1 << log) - 1) * kChunk;
  }
  __device__ __forceinline__ T* slot(int load) const {
    return selector.shared.loads.slots[threadIdx.x / 32][load % Loads::kSlots];
  }

  // Starts the warp's copies of a load. Lanes copy neighboring pieces, not those that they read later. A piece that
  // does not lie completely in the row is not read: it becomes zeros, which do not count.
  __device__ __forceinline__ void start(int load, int log) const {
    constexpr int kLanes = Loads::kLanesPerChunk, kPieceColumns = Loads::kPieceColumns;
    const int lane = threadIdx.x % 32, in_chunk = lane % kLanes * kPieceColumns;
    const int column = column_of(chunk_of(load), log) + in_chunk;
    const int room = min(run.end + kUnit - 1, run.whole_end(kPieceColumns)) - column - kPieceColumns;
    const int place = Loads::place_of(lane / kLanes * kChunk + in_chunk);
#pragma unroll
    for (int i = 0; i < kChunk; i += kLanes * kPieceColumns) {
      const uint32_t to = sm90::shared_address(slot(load) + (place ^ Loads::place_of(i)));
      sm90::copy_16_bytes(to, g_row + column + i, i <= room ? 16 : 0);
    }
    sm90::commit_copies();
  }

  // A bit for each of a lane's columns, from bit 31 down: whether it lies in the run and exceeds the threshold.
  // `first`: the lane's first column.
  __device__ __forceinline__ unsigned bits_above(const Piece (&pieces)[kLaneColumns / kPiece], int first) const {
    unsigned bits = 0;
#pragma unroll
    for (const Piece& piece : pieces) {
#pragma unroll
      for (float value : piece.values) {
        bits = __funnelshift_l(__float_as_uint(threshold - value), bits, 1);  // shifts in the sign; NaN has none
      }
    }
    bits <<= 32 - kLaneColumns;
    if (!run.contains(first, kLaneColumns)) {
      bits &= ~0u >> max(run.begin - first, 0);  // a run begins in its first unit
      const int inside = max(run.end - first, 0);
      if (inside < kLaneColumns) bits &= ~(~0u >> inside);
    }
    return bits;
  }

  // The warps read stretches in turn, each into its own list, from load 0 on, which has been started. Returns false if
  // a list has no room left; otherwise gathers the candidates in id order.
  __device__ __forceinline__ bool read_apart() {
    Storage& shared = selector.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int log = log_chunks();
    const uint32_t list = sm90::shared_address(shared.lists.entries[warp]);
#pragma unroll
    for (int load = 1; load < Loads::kSlots; ++load) start(load, log);
    unsigned listed = 0;
    for (int load = 0; column_of(load * Loads::kChunks, log) < run.end; ++load) {
      const int chunk = chunk_of(load), chunk_begin = column_of(chunk, log);
      const int first = chunk_begin + lane % Loads::kLanesPerChunk * kLaneColumns;
      T* columns = slot(load);
      const int place = Loads::place_of(lane * kLaneColumns);
      sm90::wait_copies<Loads::kSlots - 1>();
      __syncwarp();
#pragma unroll 1
      for (int i = max(0, run.whole_end(Loads::kPieceColumns) - first); i < min(kLaneColumns, run.end - first); ++i) {
        columns[place ^ i] = g_row[first + i];
      }
      Piece pieces[kLaneColumns / kPiece];
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += kPiece) pieces[i / kPiece] = load_piece(columns + (place ^ i));
      if constexpr (kFromRegisters) {
        __syncwarp();
        start(load + Loads::kSlots, log);
      }
      unsigned bits = bits_above(pieces, first);
      const unsigned lane_count = __popc(bits), to_lane = sum_to_lane(lane_count);
      const unsigned before = listed + to_lane - lane_count;
      const bool starts_stretch = lane % Loads::kLanesPerChunk == 0 && (chunk & (1 << log) - 1) == 0;
      if (starts_stretch && chunk_begin < run.end) shared.firsts[(chunk >> log) * Shape::kWarps + warp] = before;
      listed += __shfl_sync(~0u, to_lane, 31);
      if (__any_sync(~0u, listed > Lists::kSize || *static_cast<volatile int*>(&shared.full) != 0)) {
        shared.full = 1;  // other warps may see it later than at once
        break;
      }
      uint32_t to = list + before * unsigned{sizeof(uint2)};
      const auto append = [&](float value, int i) {
        store_shared(to, make_uint2(__float_as_uint(value), first + i));
        to += sizeof(uint2);
      };
      if constexpr (kFromRegisters) {
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) {
          if (bits & 0x80000000u >> i) append(pieces[i / kPiece].values[i % kPiece], i);
        }
      } else {
        while (bits != 0) {
          const int i = __clz(bits);
          bits ^= 0x80000000u >> i;
          append(static_cast<float>(columns[place ^ i]), i);
        }
        __syncwarp();
        start(load + Loads::kSlots, log);
      }
    }
    sm90::wait_copies<0>();
    return gather_lists(listed, log + kLogChunk);
  }

  // Gathers the candidates in id order, unless a list had no room left. `listed`: those of this warp.
  __device__ __forceinline__ bool gather_lists(unsigned listed, int log_stretch) {
    static_assert(Lists::kStretches % Shape::kThreads == 0);
    Storage& shared = selector.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
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
        const unsigned at = shared.firsts[(id - run.first_read) >> log_stretch] + in_list & 0xffff;
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
