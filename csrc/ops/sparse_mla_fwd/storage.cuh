// Shared memory of the sparse MLA forward kernels, and the items of work that they walk.
#pragma once

#include <cstdint>

#include "config.h"
#include "params.h"
#include "sm90/gather.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/mma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::sparse_mla_fwd {

using namespace dsa::sm90;

inline constexpr int kFrontChunks = 4;  // chunks 0..3 of a tile are the front values, 4..7 the back ones
inline constexpr int kValueChunks = 8;
inline constexpr int kLastChunk = 8;     // key columns that are no value; then P
inline constexpr int kStepColumns = 16;  // of one wgmma
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads'

// Running maxima are whole numbers, raised only when they have fallen behind by kRescaleStep. So O is rarely rescaled,
// and by powers of two; P stays below 2^kRescaleStep, where bf16 has the same relative precision.
inline constexpr float kRescaleStep = 8.f;
inline constexpr int kExponentOfOne = 127;  // in the bits of a float
__device__ __forceinline__ float power_of_two(int exponent_bits) { return __int_as_float(exponent_bits << 23); }
// The exponent bits of 2^(old_max - new_max).
__device__ __forceinline__ int rescale_bits(float old_max, float new_max) {
  return kExponentOfOne + (new_max > old_max ? static_cast<int>(fmaxf(old_max - new_max, -127.f)) : 0);
}

// Q where it stays during an item. Wide: what the score warpgroup's registers do not hold, the tail and the last 16
// value columns. Narrow: all of it, in chunks of 64 columns.
template <Config kC, bool kTail = (tail_columns(kC) > 0), bool kNarrow = is_narrow(kC)>
struct SharedQ {
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};
template <Config kC>
struct SharedQ<kC, true, false> {
  alignas(1024) Bf16 tail[kC.heads * tail_columns(kC)];
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};
template <Config kC, bool kTail>
struct SharedQ<kC, kTail, true> {
  alignas(1024) Bf16 chunks[kC.d_qk * kC.heads];
  float columns[kWarpsPerWarpgroup][kC.heads];  // one value of each head from each warp
};

template <Config kC>
struct SharedStorage {
  alignas(1024) Bf16 tiles[kC.stages][tile_bytes(kC) / 2];
  SharedQ<kC> q;
  uint32_t visible[kC.stages][kWarpsPerWarpgroup];  // see Feeder::feed
  uint8_t rescale[kC.stages][kC.heads];             // of O before the tile is added: exponent bits
  float finish[2][kC.heads];                        // of O after the last tile, for two items in turn
  int item_tiles[kC.stages];                        // with Q
  uint64_t full_front[kC.stages], full_back[kC.stages];
  uint64_t probs_written[kC.stages], probs_turn[kC.stages], probs_read[kC.stages];
  uint64_t finished[2];
};

// Where one item lies, the same for all threads.
struct Item {
  int head_block, group, s, b, split;
  int first_tile, tiles;  // at least one tile, perhaps without a visible key
  int slot_end, id_end;   // slots and ids below these are visible

  __device__ __forceinline__ Item(const Params& p, int index) {
    const int heads_per_group = p.heads / p.groups, head_blocks = ceil_div(heads_per_group, kBlockHeads);
    head_block = index % head_blocks, index /= head_blocks;
    group = index % p.groups, index /= p.groups;
    split = index % p.splits, index /= p.splits;
    s = index % p.seq_q;
    b = index / p.seq_q;
    int slots = p.topk;
    if (p.topk_length != nullptr) {
      const int length = p.topk_length[b * p.topk_length_stride_b + s * p.topk_length_stride_s];
      slots = length < 0 ? 0 : length < slots ? length : slots;
    }
    const int all_tiles = ceil_div(slots, kBlockK);
    first_tile = split * all_tiles / p.splits;
    const int end_tile = (split + 1) * all_tiles / p.splits;
    tiles = end_tile > first_tile ? end_tile - first_tile : 1;
    slot_end = end_tile * kBlockK < slots ? end_tile * kBlockK : slots;
    id_end = visible_end(p.seq_kv, p.causal, p.q_start, p.positions_per_key, s);
  }

  __device__ __forceinline__ const int* indices(const Params& p) const {
    return p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
  }
  // Row of [batch, seq_q, heads] of this item's first head.
  __device__ __forceinline__ int64_t first_row(const Params& p) const {
    return (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + group * (p.heads / p.groups) +
           head_block * kBlockHeads;
  }
  __device__ __forceinline__ int heads_left(const Params& p) const {
    return p.heads / p.groups - head_block * kBlockHeads;
  }
};

}  // namespace dsa::sparse_mla_fwd
