// What the top-k kernels keep in shared memory and in registers: entries of a row, and their radix keys.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "config.h"
#include "sm90/cluster.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/registers.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::topk_select {

using sm90::cluster_index, sm90::cluster_rank;
using sm90::increment, sm90::one_if_greater, sm90::store_shared, sm90::sum_to_lane, sm90::thread_index;

template <class T, int kCount>
struct Entries {
  alignas(16) T values[kCount];
  alignas(16) int ids[kCount];
};

// A radix digit's bins, followed by one bin per lane for keys with other leading digits: to count those too takes fewer
// instructions than a test.
template <class Shape>
struct Histogram {
  alignas(16) unsigned bins[Shape::kBins + 32];
};

// The bin that holds the wanted key, the number of keys in higher bins, and in it.
struct Found {
  unsigned bin, higher, in_bin;
};

// For CTAs that hold their run and for CTAs that filter it.
template <class Shape_>
struct SelectorStorage {
  using Shape = Shape_;
  Histogram<Shape> histograms[Shape::kIsLone ? 2 : 1];  // a cluster alternates between two
  alignas(16) Found found;
  unsigned warp_counts[2][Shape::kWarps];  // double-buffered
  unsigned warp_maxima[Shape::kWarps];
  unsigned cta_counts[2][kMaxCtas];  // double-buffered
};
template <class T, class Shape>
struct HeldStorage : SelectorStorage<Shape> {
  Entries<T, kMaxTopk> entries;
};

// Each warp's list of candidates (value, id). The warps read a run in turn, a stretch each.
template <class Shape>
struct WarpLists {
  static constexpr int kSize = Shape::kHeld / Shape::kWarps, kStretches = 512;
  uint2 entries[Shape::kWarps][kSize];
};
// What a warp loads at a time: chunks of a run, of which each lane reads kLaneColumns consecutive columns. The pieces
// of 16 bytes that a lane reads change places with each other, so that eight lanes that read one each have no bank
// conflicts.
inline constexpr int kLogChunk = 8, kChunk = 1 << kLogChunk;  // columns
template <class T, class Shape>
struct WarpLoads {
  static constexpr int kSlots = Shape::kCtasPerSm == 1 ? 4 : 1;  // where other CTAs do not hide the latency of a load
  static constexpr int kLaneColumns = 64 / sizeof(T), kColumns = 32 * kLaneColumns;
  static constexpr int kChunks = kColumns / kChunk, kLanesPerChunk = 32 / kChunks;
  static constexpr int kPieceColumns = 16 / sizeof(T), kPieces = kLaneColumns / kPieceColumns;  // of a lane
  alignas(128) T slots[Shape::kWarps][kSlots][kColumns];

  // Where a column of a load is in its slot. place_of(x ^ y) is place_of(x) ^ place_of(y).
  static __device__ __forceinline__ int place_of(int column) {
    const int lane = column / kLaneColumns;
    return column ^ lane * kPieces / 8 % kPieces * kPieceColumns;
  }
};
template <class T, class Shape>
struct FilterStorage : SelectorStorage<Shape> {
  using Lists = WarpLists<Shape>;
  using Loads = WarpLoads<T, Shape>;
  Loads loads;
  union {
    Entries<T, Shape::kHeld> entries;
    Lists lists;
  };
  // For each stretch, where its candidates begin in the list of its warp. They end where those of the warp's next
  // stretch begin, kWarps stretches later.
  uint16_t firsts[Lists::kStretches + Shape::kWarps];
  int full;  // whether a list is full
};

// Maps a float to an unsigned integer in the same order; -0 is mapped like +0. NaN and -inf, which cannot be selected,
// have key 0.
__device__ __forceinline__ unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value + 0.f);
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return value > -INFINITY ? key : 0;
}
inline constexpr unsigned kZeroKey = 0x80000000u;

__device__ __forceinline__ float value_of(unsigned key) {  // key ^ (~sign | 0x80000000)
  return __uint_as_float(sm90::xor_not_or_sign(key, static_cast<unsigned>(static_cast<int>(key) >> 31)));
}
// The first key of a value of T that is not below `key`. The lower half of a bf16 value's key is all ones if the value
// is negative, else all zeros; and -0, whose key would be kZeroKey - 1, has that of +0.
template <class T>
__device__ __forceinline__ unsigned key_from(unsigned key) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return key;
  } else {
    return key < kZeroKey - 0x10000 ? key | 0xffff : (key + 0xffff) & ~0xffffu;
  }
}
// The value whose greater values have keys above `key`. It is never -0, whose key is kZeroKey - 1, since -0 - 0 has its
// sign set: see Filter::bits_above. No entry has that key.
__device__ __forceinline__ float threshold_of(unsigned key) {
  return key == 0 ? -INFINITY : value_of(key - (key == kZeroKey - 1));
}

struct Piece {
  float values[kPiece];
};

using sm90::leave_undefined;
__device__ __forceinline__ void leave_undefined(Piece& x) {
#pragma unroll
  for (float& value : x.values) leave_undefined(value);
}

__device__ __forceinline__ Piece load_piece(const float* columns) {
  const float4 r = *reinterpret_cast<const float4*>(columns);
  return {{r.x, r.y, r.z, r.w}};
}
__device__ __forceinline__ Piece load_piece(const __nv_bfloat16* columns) {
  const uint2 r = *reinterpret_cast<const uint2*>(columns);
  const float2 first = sm90::unpack_bf16(r.x), second = sm90::unpack_bf16(r.y);
  return {{first.x, first.y, second.x, second.y}};
}

// Consecutive columns of a row. They are read from `first_read` on, which is 16-byte aligned and at most a unit before
// `begin`; it may be negative in a row that is not aligned itself.
struct Run {
  int begin, end, first_read, columns;  // columns: of the row

  __device__ __forceinline__ int size() const { return end - first_read; }  // what is read
  // The end of the last group of `unit` columns, counted from first_read, that lies completely in the row. Columns from
  // there on are read one by one.
  __device__ __forceinline__ int whole_end(int unit) const { return first_read + ((columns - first_read) & -unit); }
  __device__ __forceinline__ bool contains(int first, int count) const {
    return first >= begin && first + count <= end;
  }
};

}  // namespace dsa::topk_select
