// What the top-k kernels keep in shared memory and in registers: entries of a row, and their keys.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "config.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"

namespace dsa::topk_select {

using sm90::cluster_index, sm90::cluster_rank;

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

// %tid.x, read again: registers are scarce where keys are held.
__device__ __forceinline__ int thread_index() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// st.shared
__device__ __forceinline__ void store_shared(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, __nv_bfloat16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(__bfloat16_as_ushort(value)) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// red.shared.add of 1
__device__ __forceinline__ void increment(uint32_t address) {
  asm volatile("red.shared::cta.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

// set.gt: 1 or 0
__device__ __forceinline__ float one_if_greater(float a, float b) {
  float r;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// shfl.up: the sum of `x` over this lane and those before it
__device__ __forceinline__ unsigned sum_to_lane(unsigned x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    asm volatile(
        "{\n"
        ".reg .u32 other;\n"
        ".reg .pred exists;\n"
        "shfl.sync.up.b32 other|exists, %0, %1, 0, 0xffffffff;\n"
        "@exists add.u32 %0, %0, other;\n"
        "}\n"
        : "+r"(x)
        : "r"(lanes));
  }
  return x;
}

// An order of unsigned integers; -0 is +0. What cannot be selected, NaN and -inf, has key 0.
__device__ __forceinline__ unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value + 0.f);
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return value > -INFINITY ? key : 0;
}
inline constexpr unsigned kZeroKey = 0x80000000u;

__device__ __forceinline__ float value_of(unsigned key) {  // key ^ (~sign | 0x80000000)
  unsigned bits;
  asm("lop3.b32 %0, %1, %2, 0x80000000, 0x4b;" : "=r"(bits) : "r"(key), "r"(static_cast<int>(key) >> 31));
  return __uint_as_float(bits);
}
// The value above which keys are above `key`. The one below zero's is nobody's.
__device__ __forceinline__ float bar_of(unsigned key) {
  return key == 0 ? -INFINITY : value_of(key - (key == kZeroKey - 1));
}

struct Piece {
  float values[kPiece];
};

// Gives a register that may be left without a value one that costs nothing. Else it is live from the start.
__device__ __forceinline__ void leave_undefined(unsigned& x) { asm volatile("" : "=r"(x)); }
__device__ __forceinline__ void leave_undefined(Piece& x) {
#pragma unroll
  for (float& value : x.values) asm volatile("" : "=f"(value));
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
