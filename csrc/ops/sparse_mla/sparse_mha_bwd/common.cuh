// Common to the kernels: tensor maps, chunks of dS, and walks through the mask.
//
// A chunk is the dS of 64 keys (rows) and 64 queries (columns, in the order of stored_query), in the 128-byte swizzle:
// 8 KB. A tile of 128 queries and 128 keys has four: chunk 2 i + j is of half i of the keys and half j of the queries.
// Tiles of a head are in the order of the bits of mask.tiles.
#pragma once

#include <cuda.h>

#include "ops/sparse_mla/sparse_mha_bwd/params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"

namespace dsa::sparse_mha_bwd {

using namespace dsa::sparse_mha;
using namespace dsa::tiles;
using namespace dsa::sm90;

inline constexpr int kChunkBytes = kTileRows * kChunkColumns * 2;
static_assert(kTileBytes == 4 * kChunkBytes);

// Per thread, of the copying warps and at the launch of a kernel of three warpgroups.
inline constexpr int kCopyRegisters = 24, kStartRegisters = 168;

template <int kWidth>
using Tile = Bf16[kTileRows * kWidth];

struct Maps {
  CUtensorMap q, dout, k, k_rope, v;  // boxes of 64 positions and 64 columns of a head
};

// Loads columns of 64 positions of a head; `full` must expect their bytes. Run by one thread.
template <int kWidth>
__device__ __forceinline__ void load_tile(Bf16* tile, const CUtensorMap* map, int head, int position, int batch,
                                          uint64_t* full) {
#pragma unroll
  for (int chunk = 0; chunk < kWidth / kChunkColumns; ++chunk) {
    tma_load(tile + chunk * kChunkElements, map, {chunk * kChunkColumns, head, 0, position, batch}, full);
  }
}

// Loads 64 keys, columns with RoPE last.
__device__ __forceinline__ void load_keys(Bf16* tile, const Maps& maps, int head, int position, int batch,
                                          uint64_t* full) {
  load_tile<kNope>(tile, &maps.k, head, position, batch, full);
  load_tile<kRope>(tile + kNope / kChunkColumns * kChunkElements, &maps.k_rope, 0, position, batch, full);
}

// Lets the next kernel of the stream start once all CTAs of this one have started, and the preceding one is complete.
// So a kernel runs together with the tail of the preceding kernel, whose results it must not need; all earlier ones are
// complete. Run by one thread of each CTA.
__device__ __forceinline__ void start_next_kernel() {
  if (blockIdx.x == gridDim.x - 1) wait_for_preceding_kernel();
  launch_dependents();
}

// Where a row of a head is.
__device__ __forceinline__ Piece* row_of(const Heads& t, int batch, int position, int head) {
  auto* g_first = static_cast<Bf16*>(t.data);
  return reinterpret_cast<Piece*>(g_first + batch * t.stride_b + position * t.stride_s + head * t.stride_h);
}

// The dS of a head among `heads_at_once` that begin with first_head, a multiple of these.
__device__ __forceinline__ char* scores_of(const Params& p, int batch, int head, int first_head) {
  const int buffer = first_head / p.heads_at_once % kBuffers;
  const int64_t index = (int64_t{buffer} * p.batch + batch) * p.heads_at_once + head - first_head;
  return static_cast<char*>(p.dscores) + index * p.tiles_per_head * kTileBytes;
}

// The query whose gradients are in column `place` of a chunk.
__device__ __forceinline__ constexpr int stored_query(int place) {
  return (place & ~31) | place / 2 % 4 * 8 | place / 8 % 4 * 2 | place % 2;
}

template <class Fragment>
__device__ __forceinline__ auto& pairs_of(Fragment& r) {
  return *reinterpret_cast<uint32_t (*)[sizeof(r) / 16][4]>(r.data());
}

// Stores a chunk from the operand fragment of dS^T [keys, queries]: of each of its two keys, a thread stores 16 bytes
// at once, of 8 queries that are not neighbors.
template <class Fragment>
__device__ __forceinline__ void store_chunk(char* g_chunk, Fragment& r_ds, int thread) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
  const auto& pairs = pairs_of(r_ds);  // [keys, keys + 8, next keys, next keys + 8] of 16 queries each
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    char* g_piece = g_chunk + swizzled_offset(row, lane % 4 + half * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = half * 2;
      __stcs(reinterpret_cast<uint4*>(g_piece + i * 8 * kSwizzleRowBytes),
             make_uint4(pairs[first][i], pairs[first][2 + i], pairs[first + 1][i], pairs[first + 1][2 + i]));
    }
  }
}

// Calls found(query_block, tile) for the query blocks that attend to a key block, the last one first, with the index of
// the tile among those of a head. Run by one warp.
template <class Found>
__device__ __forceinline__ void for_query_blocks(const Params& p, int batch, int key_block, int lane,
                                                 const Found& found) {
  const uint32_t bit = 1u << key_block % 32;
  for (int end = p.mask.q_blocks; end > 0; end -= kWarpThreads) {
    const int own = end - 1 - lane;
    uint32_t word = 0;
    int tile = 0;
    if (own >= 0) {
      const int64_t place = (int64_t{batch} * p.mask.q_blocks + own) * p.mask.tile_words + key_block / 32;
      word = __ldg(p.mask.tiles + place);
      tile = __ldg(p.tile_offsets + place) + __popc(word & (bit - 1));
    }
    for (unsigned left = __ballot_sync(~0u, (word & bit) != 0); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      found(end - 1 - from, __shfl_sync(~0u, tile, from));
    }
  }
}

// How many they are. Run by one warp.
__device__ __forceinline__ int count_query_blocks(const Params& p, int batch, int key_block, int lane) {
  int count = 0;
  const uint32_t* g_tiles = p.mask.tiles + int64_t{batch} * p.mask.q_blocks * p.mask.tile_words + key_block / 32;
  for (int i = lane; i < p.mask.q_blocks; i += kWarpThreads) {
    count += __ldg(g_tiles + int64_t{i} * p.mask.tile_words) >> key_block % 32 & 1;
  }
  return __reduce_add_sync(~0u, count);
}

}  // namespace dsa::sparse_mha_bwd
