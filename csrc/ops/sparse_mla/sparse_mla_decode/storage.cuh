// Shared memory of the sparse MLA decode kernel.
#pragma once

#include <cstdint>

#include "config.h"
#include "items.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/registers.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_decode {

using namespace dsa::sm90;
using namespace dsa::tiles;

inline constexpr int kChunkBytes = kChunkElements * sizeof(Bf16);
inline constexpr int kValueChunks = kValueColumns / kChunkColumns;
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads
static_assert(kTileRows == kTileKeys);

// The thread's index in its warpgroup, and its first row of an accumulator. Read again wherever they are needed:
// registers are scarce.
__device__ __forceinline__ unsigned warpgroup_thread() { return unsigned(thread_index()) % kWarpgroupThreads; }
__device__ __forceinline__ unsigned fragment_row() {
  const unsigned thread = warpgroup_thread();
  return thread / kWarpThreads * 16 + thread % kWarpThreads / 4;
}

// Probabilities [heads, 64 keys] in fp32. The two keys of a thread's fragment of S^T, key and key + 8, are adjacent:
// the order of keys is that of place_of_key. Groups of eight are swizzled by head, so that neither the writer nor the
// reader has bank conflicts. In bytes: 16 places further are 64, exclusive-or in an even group of 16 places.
__device__ __forceinline__ int place_of_key(int warp, int lane) { return warp * 16 + lane / 4 * 2; }
__device__ __forceinline__ int probs_offset(int head, int place) {
  const int swizzle = (head >> 1 & 3) ^ (head & 1) << 1;
  return head * kTileRows + ((place >> 3 ^ swizzle) << 3) + (place & 7);
}

// The order of columns in a chunk of 64 in shared memory: that of the fragments of wgmma whose lanes loaded 16 bytes
// each. Of eight columns p of a row, pair j is word `owner` of piece `first + j`.
__device__ __forceinline__ uint32_t pair_offset(int row, int p, int j, bool is_packed) {
  const int owner = is_packed ? p / 2 : p % 4, first = is_packed ? p % 2 * 4 : p / 4 * 4;
  return swizzled_offset(row, first + j) + owner * 4;
}
// The inverse: the column at an even place of that order.
__device__ __forceinline__ int column_of_place(int place, bool is_packed) {
  const int step = place / 16 % 4, half = place / 8 % 2, owner = place / 2 % 4, chunk = place / kChunkColumns;
  const int column =
      is_packed ? 16 * owner + 4 * step + 2 * half : 32 * (step / 2) + 8 * owner + 4 * (step % 2) + 2 * half;
  return chunk * kChunkColumns + column;
}

inline constexpr int kRows = 64;  // of P and O: heads, and zeros for those that an item does not have

template <Config kC>
struct SharedStorage {
  alignas(1024) Bf16 values[kStages][kValueColumns * kTileRows];  // in chunks of 64 columns
  alignas(1024) Bf16 q[kC.d_qk * kC.heads];                       // in chunks of 64 columns
  // What the value warpgroups take besides values.
  alignas(1024) float probs[kRows * kTileRows];
  alignas(16) float factors[kScaleGroups][kTileRows];  // of the scales of packed keys, in the order of probs
  float row_max[kRows];                                // in units of log 2
  int finished_item;                                   // whose last tile this is, or -1
  uint8_t rescale[kRows];                              // of O before the tile is added: exponent bits
  // Of the score warpgroup: maxima in units of log 2, and those of a tile by warp.
  alignas(8) float running_max[kC.heads];
  float warp_tops[kWarpsPerWarpgroup][kC.heads];
  uint64_t full[kStages], empty[kStages], probs_read;
};

}  // namespace dsa::sparse_mla_decode
