// Radix select among held entries: finds the last key to keep, digit by digit, and gathers the kept entries in id
// order.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "entries.cuh"

namespace dsa::topk_select {

// What is kept: all keys above `threshold`, and the first `ties` keys equal to it.
struct Selection {
  unsigned threshold, ties;
};

// Where a search begins: the first digit of a key is (key - low) >> shift. If that leaves out higher keys, `keys` is
// the number of all keys that are not below `low`.
struct Start {
  unsigned low = 0, keys = 0;
  int shift;
};

// Counts of a thread's keys, given one bit each: before this lane in each piece of the warp, and in the whole piece.
template <int kPieces>
class PieceCounts {
  static constexpr int kWords = kPieces / 4;
  static_assert(kPieces % 4 == 0 && kWords <= 2);
  unsigned before_[kWords], total_[kWords];

  static __device__ __forceinline__ unsigned piece_of(const unsigned (&counts)[kWords], int piece) {
    return counts[kWords == 1 ? 0 : piece % 2] >> 8 * (kWords == 1 ? piece % 2 * 2 + piece / 2 : piece / 2) & 0xff;
  }

 public:
  __device__ __forceinline__ explicit PieceCounts(unsigned bits) {
    bits -= bits >> 1 & 0x55555555u;
    bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);  // 4 bits per piece
    unsigned counts[kWords];
    if constexpr (kWords == 1) {
      counts[0] = (bits & 0x0f0fu) | (bits & 0xf0f0u) << 12;
    } else {
      counts[0] = bits & 0x0f0f0f0fu;
      counts[1] = bits >> 4 & 0x0f0f0f0fu;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      before_[i] = sum_to_lane(counts[i]);
      total_[i] = __shfl_sync(~0u, before_[i], 31);
      before_[i] -= counts[i];
    }
  }
  __device__ __forceinline__ unsigned warp_total() const {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) sum = __dp4a(total_[i], 0x01010101u, sum);
    return sum;
  }
  __device__ __forceinline__ unsigned before_lane(int piece) const { return piece_of(before_, piece); }
  __device__ __forceinline__ unsigned piece_total(int piece) const { return piece_of(total_, piece); }
};

// The position of a thread's first held entry among a CTA's, whose warps hold `pieces` pieces each.
__device__ __forceinline__ int held_place(int pieces) {
  const int thread = thread_index();
  return thread / 32 * pieces * kWarpPiece + thread % 32 * kPiece;
}

// The selection by a CTA, or by a cluster of `ctas` CTAs.
template <class Storage>
struct Selector {
  using Shape = typename Storage::Shape;
  static constexpr int kPieces = Shape::kPieces, kKeys = Shape::kKeys, kBins = Shape::kBins;
  static constexpr Start kWhole{.shift = 32 - Shape::kDigitBits};
  using Keys = unsigned[kKeys];
  using Value = std::remove_all_extents_t<decltype(Storage::entries.values)>;
  // Of the last digit. The lower bits of the key of a bf16 value follow from the others, see key_from.
  static constexpr int kLastShift = 32 - 8 * int{sizeof(Value)};

  Storage& shared;
  int counts_turn = 0, cta_counts_turn = 0, histogram_turn = 0;

  static __device__ __forceinline__ void clear(Histogram<Shape>& histogram) {
#pragma unroll
    for (int i = 0; i < Shape::kBinsPerThread / 4; ++i) {
      reinterpret_cast<uint4*>(histogram.bins)[thread_index() * (Shape::kBinsPerThread / 4) + i] = {};
    }
  }

  static __device__ __forceinline__ void sync(int ctas) {
    if (ctas > 1) {
      cooperative_groups::this_cluster().sync();
    } else {
      __syncthreads();
    }
  }

  // Notes a warp's highest key, of the highest ones of its lanes.
  __device__ __forceinline__ void set_maximum(unsigned highest) {
    highest = __reduce_max_sync(~0u, highest);
    if (threadIdx.x % 32 == 0) shared.warp_maxima[threadIdx.x / 32] = highest;
  }
  // A search of keys from `low` on: its first digits span those up to the warps' maxima, if that excludes key 0.
  // Without a `low` it begins with the first digit of all keys. `keys`: see Start.
  __device__ __forceinline__ Start start_from(unsigned low, unsigned keys) const {
    if (low == 0) return kWhole;
    const int lane = thread_index() % 32;
    const unsigned highest = __reduce_max_sync(~0u, lane < Shape::kWarps ? shared.warp_maxima[lane] : 0);
    const int shift = max(0, 32 - __clz(highest - low) - Shape::kDigitBits);
    if ((0 - low) >> shift < kBins) return kWhole;
    return {.low = low, .keys = keys, .shift = shift};
  }

  // Sums a count that is the same in all lanes of a warp: over earlier warps, and over all. Synchronizes the CTA.
  __device__ __forceinline__ uint2 sum_warps(unsigned warp_count) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (lane == 0) shared.warp_counts[counts_turn][warp] = warp_count;
    __syncthreads();
    const unsigned count = lane < Shape::kWarps ? shared.warp_counts[counts_turn][lane] : 0;
    counts_turn ^= 1;
    return {__reduce_add_sync(~0u, lane < warp ? count : 0), __reduce_add_sync(~0u, count)};
  }

  // Sums a count that is the same in all threads of a CTA: over earlier CTAs, and over all. Synchronizes the cluster.
  __device__ __forceinline__ uint2 sum_ctas(unsigned cta_count, int ctas) {
    if (ctas == 1) return {0, cta_count};
    auto cluster = cooperative_groups::this_cluster();
    const int rank = cluster_rank();
    unsigned* counts = shared.cta_counts[cta_counts_turn];
    cta_counts_turn ^= 1;
    if (threadIdx.x < ctas) *cluster.map_shared_rank(counts + rank, threadIdx.x) = cta_count;
    cluster.sync();
    uint2 sums{};
#pragma unroll 1
    for (int r = 0; r < ctas; ++r) {
      sums.x += r < rank ? counts[r] : 0;
      sums.y += counts[r];
    }
    return sums;
  }

  // Adds the counts of the cluster's other CTAs for these bins.
  static __device__ __forceinline__ void add_others(unsigned (&bins)[Shape::kBinsPerThread], const unsigned* mine,
                                                    int ctas) {
    auto cluster = cooperative_groups::this_cluster();
    const int rank = cluster_rank();
#pragma unroll 3
    for (int r = 0; r < ctas - 1; ++r) {
      const auto others = reinterpret_cast<const uint4*>(cluster.map_shared_rank(mine, r + (r >= rank)));
#pragma unroll
      for (int i = 0; i < Shape::kBinsPerThread / 4; ++i) {
        const uint4 other = others[i];
        bins[4 * i] += other.x, bins[4 * i + 1] += other.y, bins[4 * i + 2] += other.z, bins[4 * i + 3] += other.w;
      }
    }
  }

  // Selects the best `wanted` keys, and at most `spare` more, among `pieces` pieces per thread of all CTAs; all keys
  // but 0 if there are fewer. The histogram is clear before and after.
  template <int kCount>
  __device__ __forceinline__ Selection find(const unsigned (&keys)[kCount], int pieces, unsigned wanted, int ctas,
                                            Start start, unsigned spare = 0) {
    unsigned prefix = start.low, keys_from_low = start.keys;
    for (int shift = start.shift;;) {
      Histogram<Shape>& histogram = shared.histograms[histogram_turn];
      const uint32_t bins_address = sm90::shared_address(histogram.bins);
      const int thread = thread_index();
      const unsigned other = kBins + thread % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / kPiece >= pieces) break;
        increment(bins_address + min((keys[i] - prefix) >> shift, other) * unsigned{sizeof(unsigned)});
      }
      sync(ctas);
      // Thread t has the t-th group of bins from the top.
      const unsigned group = Shape::kThreads - 1 - thread;
      unsigned* group_bins = histogram.bins + group * Shape::kBinsPerThread;
      unsigned bins[Shape::kBinsPerThread];
#pragma unroll
      for (int i = 0; i < Shape::kBinsPerThread; i += 4) {
        *reinterpret_cast<uint4*>(bins + i) = *reinterpret_cast<const uint4*>(group_bins + i);
        if (ctas == 1) *reinterpret_cast<uint4*>(group_bins + i) = {};
      }
      if constexpr (Shape::kIsLone) {
        if (ctas > 1) {
          // All CTAs have read the other histogram.
          histogram_turn ^= 1;
          clear(shared.histograms[histogram_turn]);
          add_others(bins, group_bins, ctas);
        }
      }
      unsigned group_count = 0;
#pragma unroll
      for (int i = 0; i < Shape::kBinsPerThread; ++i) group_count += bins[i];
      const unsigned to_lane = sum_to_lane(group_count);
      const uint2 sums = sum_warps(__shfl_sync(~0u, to_lane, 31));
      if (keys_from_low > 0) {
        const unsigned left_out = keys_from_low - sums.y;
        keys_from_low = 0;
        if (wanted <= left_out) {
          prefix = 0;
          shift = kWhole.shift;
          continue;
        }
        wanted -= left_out;
      }
      unsigned higher = sums.x + to_lane - group_count;
      if (higher < wanted && (wanted <= higher + group_count || group == 0)) {
        unsigned bin = Shape::kBinsPerThread - 1, in_bin = bins[bin];
#pragma unroll
        for (int next = Shape::kBinsPerThread - 2; next >= 0; --next) {
          if (higher + in_bin < wanted && bin == unsigned(next + 1)) {
            higher += in_bin;
            in_bin = bins[next];
            bin = next;
          }
        }
        shared.found = {group * Shape::kBinsPerThread + bin, higher, in_bin};
      }
      __syncthreads();
      const Found found = shared.found;
      prefix += found.bin << shift;
      if (prefix == 0) return {0, 0};  // only key 0 has this digit
      wanted -= found.higher;
      if (found.in_bin <= wanted + spare) return {prefix - 1, 0};
      if (shift <= kLastShift) return {key_from<Value>(prefix), wanted};
      // If the last bin spans fewer keys than there are bins, its digits are the uppermost bins.
      const int next_shift = max(kLastShift, shift - Shape::kDigitBits);
      prefix -= (kBins << next_shift) - (1 << shift);
      shift = next_shift;
    }
  }

  // A bit for each key: whether holds(key).
  template <class Holds>
  static __device__ __forceinline__ unsigned bits_of(const Keys& keys, int pieces, Holds holds) {
    unsigned bits = 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
#pragma unroll
      for (int i = piece * kPiece; i < (piece + 1) * kPiece; ++i) bits |= unsigned{holds(keys[i])} << i;
    }
    return bits;
  }

  // A bit for each key: whether it is kept.
  __device__ __forceinline__ unsigned kept_bits(const Keys& keys, int pieces, Selection selection, int ctas) {
    unsigned bits = bits_of(keys, pieces, [&](unsigned key) { return key > selection.threshold; });
    if (selection.ties == 0) return bits;
    const unsigned ties = bits_of(keys, pieces, [&](unsigned key) { return key == selection.threshold; });
    const PieceCounts<kPieces> counts(ties);
    const uint2 warp_sums = sum_warps(counts.warp_total());
    unsigned piece_rank = sum_ctas(warp_sums.y, ctas).x + warp_sums.x;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      unsigned rank = piece_rank + counts.before_lane(piece);
#pragma unroll
      for (int i = piece * kPiece; i < (piece + 1) * kPiece; ++i) {
        if (ties >> i & 1 && rank++ < selection.ties) bits |= 1u << i;
      }
      piece_rank += counts.piece_total(piece);
    }
    return bits;
  }

  // Writes the kept entries (`bits`), with value(i) and id(i), to the front of the shared entries, in id order. Returns
  // their number.
  template <class ValueOf, class IdOf>
  __device__ __forceinline__ int keep(unsigned bits, int pieces, ValueOf value, IdOf id) {
    const PieceCounts<kPieces> counts(bits);
    const uint2 sums = sum_warps(counts.warp_total());
    const auto& entries = shared.entries;
    const uint32_t ids = sm90::shared_address(entries.ids), values = sm90::shared_address(entries.values);
    constexpr unsigned kValuesPerId = sizeof(int) / sizeof(entries.values[0]);
    for_kept<sizeof(int)>(bits, pieces, sums.x, counts, [&](uint32_t offset, int i) {
      store_shared(values + offset / kValuesPerId, value(i));
      store_shared(ids + offset, id(i));
    });
    return sums.y;
  }

  // The same for entries that are in shared memory, in place.
  __device__ __forceinline__ int keep_in_place(unsigned bits, int pieces) {
    const PieceCounts<kPieces> counts(bits);
    const auto move = [&](auto* entries, auto& held, unsigned first_place) {
      const uint32_t address = sm90::shared_address(entries);
      for_kept<sizeof(*entries)>(bits, pieces, first_place, counts, [&](uint32_t offset, int i) {
        store_shared(address + offset, held[i / kPiece].of[i % kPiece]);
      });
    };
    Held<Value> values[kPieces]{};
    load_held(values, shared.entries.values, pieces);
    const uint2 sums = sum_warps(counts.warp_total());  // also: all have loaded
    move(shared.entries.values, values, sums.x);
    Held<int> ids[kPieces]{};
    load_held(ids, shared.entries.ids, pieces);
    __syncthreads();
    move(shared.entries.ids, ids, sums.x);
    return sums.y;
  }

 private:
  template <class X>
  struct alignas(kPiece * sizeof(X)) Held {
    X of[kPiece];
  };
  template <class X>
  static __device__ __forceinline__ void load_held(Held<X> (&to)[kPieces], const X* entries, int pieces) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      to[piece] = *reinterpret_cast<const Held<X>*>(entries + held_place(pieces) + piece * kWarpPiece);
    }
  }

  template <unsigned kSize, class Do>
  static __device__ __forceinline__ void for_kept(unsigned bits, int pieces, unsigned first_place,
                                                  const PieceCounts<kPieces>& counts, Do act) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      uint32_t offset = (first_place + counts.before_lane(piece)) * kSize;
#pragma unroll
      for (int i = piece * kPiece; i < (piece + 1) * kPiece; ++i) {
        if (bits >> i & 1) {
          act(offset, i);
          offset += kSize;
        }
      }
      first_place += counts.piece_total(piece);
    }
  }
};

}  // namespace dsa::topk_select
