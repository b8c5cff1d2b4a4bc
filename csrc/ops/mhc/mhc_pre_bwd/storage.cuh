// Sizes, shared memory and the work of a CTA of columns_kernel.
#pragma once

#include <cuda_bf16.h>

#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

inline constexpr int kChunk = 64, kChunkPieces = kChunk / 8;  // columns: the swizzle has no longer rows
inline constexpr int kChunks = kColumns / kChunk;
inline constexpr int kGroups = kChunk / 8;  // of the columns of a multiply warp, which has a chunk of a stream
inline constexpr int kGateWarps = 2, kOtherRegisters = 48;

template <int kStreams>
struct Shape {
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kBlocks = kMixed / 8;  // of 8 rows of phi
  static constexpr int kPitch = pitch_of(kStreams);
  static constexpr int kStages = kStreams == 2 ? 8 : 10;
  // Two warpgroups have the other roles. They leave registers to the multiply warps.
  static constexpr int kMultiplyWarps = kChunks * kStreams, kMultiplyThreads = kMultiplyWarps * kWarpThreads;
  static constexpr int kOtherThreads = 2 * kWarpgroupThreads, kThreads = kMultiplyThreads + kOtherThreads;
  static constexpr int kStart = 65536 / (ctas_per_sm(kStreams) * kThreads) / 8 * 8;
  static constexpr int kMultiplyRegisters =
      (kStart * kThreads - kOtherRegisters * kOtherThreads) / kMultiplyThreads / 8 * 8;
  static_assert(kStreams + 2 + kGateWarps <= kOtherThreads / kWarpThreads);
};

// The gates' gradients are in the order of streams, of each its gates pre, post, and res. Returns the row of phi.
template <int kStreams>
__device__ __forceinline__ int row_of_phi(int place) {
  const int stream = place / (kStreams + 2), gate = place % (kStreams + 2);
  return gate < 2 ? gate * kStreams + stream : (2 + stream) * kStreams + gate - 2;
}

template <int kStreams>
struct Tile {
  __nv_bfloat16 x[kChunks][kStreams][kTokens * kChunk], dh_in[kChunks][kTokens * kChunk];
};

template <int kStreams>
struct ColumnStorage {
  static constexpr int kStages = Shape<kStreams>::kStages;

  alignas(1024) Tile<kStreams> tiles[kStages];
  alignas(16) __nv_bfloat16 gates[kStages][kTokens * pitch_of(kStreams)];
  uint64_t full[kStages], gates_full[kStages], done[kStages];
};

// A CTA's columns, and its run of tiles of tokens: every p.runs-th tile, so that all CTAs read tokens that are near
// each other.
struct Run {
  int slices, slice, index, count, step;

  __device__ __forceinline__ int first_column() const { return slice * kColumns; }
  __device__ __forceinline__ int tile(int i) const { return index + i * step; }

  __device__ __forceinline__ explicit Run(const Params& p) {
    const int tiles = (p.tokens - 1) / kTokens + 1;
    slices = p.columns / kColumns, slice = blockIdx.x % slices, index = blockIdx.x / slices;
    step = p.runs, count = (tiles - index + p.runs - 1) / p.runs;
  }
};

}  // namespace dsa::mhc_pre_bwd
