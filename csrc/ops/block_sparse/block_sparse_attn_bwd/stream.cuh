// Common to both roles of a stream: its shared memory, and the tiles of dS that go from one role to the other.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "ops/block_sparse/operands.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/signals.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"

namespace dsa::block_sparse_attn_bwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kStreams = 2;
inline constexpr int kThreads = (kStreams + 1) * kWarpgroupThreads;
inline constexpr int kComputeRegisters = 224, kCopyRegisters = 56, kStartRegisters = 168;

template <int kColumns>
using Tile = Bf16[kBlock * kColumns];

// What a slot holds. An item is kKeys, pairs and kEnd, or pairs and kEnd.
enum Kind : int {
  kKeys,  // a block of keys and values, until the end of the item
  kPair,  // queries and dout; or keys and a tile of dS
  kEnd,   // nothing: its tiles stage gradients on their way to global memory
  kStop,  // nothing: there is no further item
};

struct Header {
  Kind kind;
  // kKeys: the block whose sums are continued, or -1. kPair: the tile of dS, or the number of valid keys. kEnd of keys:
  // whether the sums will be continued.
  int value;
  // kEnd: the unit; the block and, of keys, the number of valid ones and, if heads are divided into parts, its index.
  int unit, head, position, batch, keys, block;
};

// The slots in the order of their use: in turn, but for the one that holds keys and values.
template <int kSlots>
class Walk {
  uint32_t used_ = 0;  // bit i: parity of the uses of slot i
  int held_ = -1;

 public:
  int slot = 0;

  __device__ __forceinline__ uint32_t parity() const { return used_ >> slot & 1; }
  __device__ __forceinline__ void advance() {
    used_ ^= 1u << slot;
    do {
      slot = slot + 1 == kSlots ? 0 : slot + 1;
    } while (slot == held_);
  }
  __device__ __forceinline__ int held() const { return held_; }
  // The present slot is not used again until the end of the item.
  __device__ __forceinline__ void hold() {
    held_ = slot;
    advance();
  }
  __device__ __forceinline__ void end_item() {
    held_ = -1;
    advance();
  }
};

template <int kColumns>
struct Stream {
  static constexpr int kSlots = 3 * 128 / kColumns;

  struct Slot {
    alignas(1024) Tile<kColumns> rows;     // queries, keys
    alignas(1024) Tile<kColumns> factors;  // dout, values, or a tile of dS
  };

  Slot slots[kSlots];
  alignas(16) float bases[kSlots][2][kBlock];  // bases, and delta
  Header headers[kSlots];
  uint64_t full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kSlots; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarpgroupThreads);
  }
};
static_assert(sizeof(Tile<64>) == kPairBytes);

struct Maps {
  CUtensorMap q, dout, k, v, dq, dk, dv;
};

// Tiles of dS, [keys, queries], are the A operand of dS K: chunks of 64 rows in the 128-byte swizzle (ColumnsByRows).
// A thread that has computed two keys' gradients stores 16 bytes at once, of 8 queries that are not neighbors.

// The query whose gradients are in column `place` of a tile.
__device__ __forceinline__ constexpr int stored_query(int place) {
  return (place & ~31) | place / 2 % 4 * 8 | place / 8 % 4 * 2 | place % 2;
}

// Stores a tile from the operand fragment of dS^T [keys, queries].
template <class Fragment>
__device__ __forceinline__ void store_score_gradients(char* g_tile, Fragment& r_ds, int thread) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
  const auto& pairs = pairs_of(r_ds);  // [keys, keys + 8, next keys, next keys + 8] of 16 queries each
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    char* g_piece = g_tile + swizzled_offset(row, lane % 4 + half * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = half * 2;
      __stcs(reinterpret_cast<uint4*>(g_piece + i * 8 * kSwizzleRowBytes),
             make_uint4(pairs[first][i], pairs[first][2 + i], pairs[first + 1][i], pairs[first + 1][2 + i]));
    }
  }
}

}  // namespace dsa::block_sparse_attn_bwd
