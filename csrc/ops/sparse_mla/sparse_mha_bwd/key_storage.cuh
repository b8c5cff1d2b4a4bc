// Gradients of keys: work distribution and shared memory.
#pragma once

#include "common.cuh"
#include "sm90/mbarrier.cuh"

namespace dsa::sparse_mha_bwd {

inline constexpr int kKeyWarpgroups = 2;  // each has 64 keys
inline constexpr int kKeyThreads = (kKeyWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kKeyRegisters = 240;
inline constexpr int kTurnBarrier = 1;  // of warpgroup 0; the next one is that of warpgroup 1

// A block of keys, and heads_together heads, which a CTA takes in turn. Those with most queries of a causal mask come
// first.
struct KeyItem {
  int block, batch, first_head, end_head;

  __device__ __forceinline__ KeyItem(const Params& p, int first, int end) {
    const int groups = (end - first + p.heads_together - 1) / p.heads_together;
    const int index = static_cast<int>(blockIdx.x);
    block = index / (groups * p.batch);
    batch = index / groups % p.batch;
    first_head = first + index % groups * p.heads_together;
    end_head = min(first_head + p.heads_together, end);
  }
};

// Keys and values of a warpgroup.
struct Held {
  alignas(1024) Tile<kColumns> keys;
  alignas(1024) Tile<kValueColumns> values;

  static constexpr int kBytes = sizeof(Tile<kColumns>) + sizeof(Tile<kValueColumns>);
};

// What comes with 64 queries.
struct Queries {
  alignas(1024) Tile<kColumns> rows;
  alignas(1024) Tile<kValueColumns> dout;

  static constexpr int kRowBytes = 2 * kTileRows * sizeof(float);
  static constexpr int kBytes = sizeof(Tile<kColumns>) + sizeof(Tile<kValueColumns>) + kRowBytes;
};

struct KeyStorage {
  static constexpr int kSlots = 3;

  Held held[kKeyWarpgroups];
  Queries queries[kSlots];
  alignas(16) float bases[kSlots][2][kTileRows];  // bases, and delta
  alignas(16) uint2 bits[kSlots][kBlock];         // of each key: which queries attend to it
  int chunks[kSlots];                             // where the dS of the first 64 keys goes
  uint64_t full[kSlots], empty[kSlots];
  uint64_t held_full[kKeyWarpgroups], held_empty[kKeyWarpgroups];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], 1 + kWarpThreads);
      barrier_init(&empty[i], kKeyWarpgroups * kWarpsPerWarpgroup);
    }
    for (int i = 0; i < kKeyWarpgroups; ++i) {
      barrier_init(&held_full[i], 1);
      barrier_init(&held_empty[i], kWarpsPerWarpgroup);
    }
  }
};

// Arrives for a warp, whose lanes have all come here.
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}

}  // namespace dsa::sparse_mha_bwd
