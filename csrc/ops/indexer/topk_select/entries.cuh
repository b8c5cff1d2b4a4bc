// What the top-k kernels keep in shared memory and in registers: entries of a row, and their keys.
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

// A digit's bins, and behind them one of each lane for keys that have other digits before: they are counted too, which
// takes fewer instructions than a test.
template <class Shape>
struct Histogram {
  alignas(16) unsigned bins[Shape::kBins + 32];
};

// The bin that holds the wanted key, how many keys are in those above it, and in it.
struct Found {
  unsigned bin, higher, in_bin;
};

// Of CTAs that hold their run as well as of those that filter it.
template <class Shape_>
struct SelectorStorage {
  using Shape = Shape_;
  Histogram<Shape> histograms[2];  // a cluster's turns
  alignas(16) Found found;
  unsigned warp_counts[2][Shape::kWarps];  // in turn
  unsigned warp_maxima[Shape::kWarps];
  unsigned cta_counts[2][kMaxCtas];  // in turn
};
template <class T, class Shape>
struct HeldStorage : SelectorStorage<Shape> {
  Entries<T, kMaxTopk> entries;
};

// A run in stretches, which the warps read in turn: what each warp has found, values and ids, and where what it found
// in a stretch begins in its list.
template <class Shape>
struct WarpLists {
  static constexpr int kSize = Shape::kHeld / Shape::kWarps, kStretches = 512;
  uint2 entries[Shape::kWarps][kSize];
};
template <class T, class Shape>
struct FilterStorage : SelectorStorage<Shape> {
  using Lists = WarpLists<Shape>;
  union {
    Entries<T, Shape::kHeld> entries;
    Lists lists;
  };
  uint16_t firsts[Lists::kStretches + kReadAhead * Shape::kWarps + Shape::kWarps];
  int full;  // a list is
};

// An order of unsigned integers; -0 is +0. What cannot be selected, NaN and -inf, has key 0.
__device__ __forceinline__ unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value + 0.f);
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return value > -INFINITY ? key : 0;
}
inline constexpr unsigned kZeroKey = 0x80000000u;

__device__ __forceinline__ float value_of(unsigned key) {  // key ^ (~sign | 0x80000000)
  return __uint_as_float(sm90::xor_not_or_sign(key, static_cast<unsigned>(static_cast<int>(key) >> 31)));
}
// The value above which keys are above `key`. The one below zero's is nobody's.
__device__ __forceinline__ float bar_of(unsigned key) {
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

// Consecutive columns of a row. They are read from `first_read` on, which begins 16-byte aligned, at most a unit before
// `begin`; in a row that does not begin so itself it may be negative.
struct Run {
  int begin, end, first_read, columns;  // the latter of the row

  __device__ __forceinline__ int size() const { return end - first_read; }  // that is read
  // The column behind the last piece that lies in the row as a whole. Those from there on are read one by one.
  __device__ __forceinline__ int pieces_end() const { return first_read + ((columns - first_read) & -kPiece); }
  __device__ __forceinline__ bool contains(int first, int count) const {
    return first >= begin && first + count <= end;
  }
};

}  // namespace dsa::topk_select
