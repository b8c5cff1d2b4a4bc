// Shared memory of the sparse MLA forward kernels, and their work items.
#pragma once

#include <cutlass/fast_math.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "config.h"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/online_softmax.cuh"

namespace dsa::sparse_mla_fwd {

using namespace dsa::tiles;

// Of a tile, chunks 0..3 (the front half) hold the front values and chunks 4..7 the back values; chunk 8 holds the key
// columns that are no values (the tail), later P.
inline constexpr int kFrontChunks = 4, kBackChunks = 5, kLastChunk = 8;
static_assert(kTileRows == kBlockK && kGatherRows == kBlockK, "a tile is what one wgmma scores and one gather copies");
inline constexpr int kStepColumns = 16;                                       // K of one wgmma
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads

// Where Q stays during an item. Wide: what the score warpgroup's registers do not hold, the tail and the last 16 value
// columns. Narrow: all of Q, in chunks of 64 columns.
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
  float columns[kWarpsPerWarpgroup][kC.heads];  // one value per head and warp
};

// The stages of tiles. If both halves have equally many stages, they are adjacent, so that a tile is contiguous.
template <Config kC>
struct SharedTiles {
  static constexpr bool kWhole = kC.front_stages == kC.back_stages;
  static constexpr int kFrontStride = (kFrontChunks + (kWhole ? kBackChunks : 0)) * kChunkElements;
  static constexpr int kBackStride = (kBackChunks + (kWhole ? kFrontChunks : 0)) * kChunkElements;
  static constexpr int kFirstBack = kFrontChunks * (kWhole ? 1 : kC.front_stages) * kChunkElements;

  alignas(1024) Bf16 elements[(kC.front_stages * kFrontChunks + kC.back_stages * kBackChunks) * kChunkElements];

  // Chunk `chunk` of a tile; `slot` is that of the half that contains it.
  __device__ __forceinline__ Bf16* chunk(int slot, int chunk) {
    return chunk < kFrontChunks ? elements + slot * kFrontStride + chunk * kChunkElements
                                : elements + kFirstBack + slot * kBackStride + (chunk - kFrontChunks) * kChunkElements;
  }
};

template <Config kC>
struct SharedStorage {
  SharedTiles<kC> tiles;
  SharedQ<kC> q;
  uint32_t visible[kC.front_stages][kWarpsPerWarpgroup];  // see publish_visible
  uint8_t rescale[kC.back_stages][kC.heads];              // of O before the tile is added: exponent bits
  float finish[2][kC.heads];                              // factor of O after the last tile, double-buffered by item
  int item_tiles[2][kC.front_stages];                     // arrives with Q; by parity and slot of the front ring
  uint64_t full_front[kC.front_stages], full_back[kC.back_stages];
  uint64_t probs_written[kC.back_stages], probs_turn[kC.back_stages], probs_read[kC.back_stages];
  uint64_t finished[2];
};

// Values derived from Params once, on the host.
struct KernelParams : Params {
  KernelParams(const Params& params, const Maxima& maxima);

  int64_t rows;                                                            // batch * seq_q * heads
  int items;                                                               // (query, split, group, block of heads)
  cutlass::FastDivmod head_blocks, group_count, split_count, query_count;  // to decode an item's index
  float scale_log2;  // |sm_scale| * log2(e); above zero so that masked scores stay -inf
  bool negate_q;     // sm_scale is negative
  Maxima maxima;
};

inline KernelParams::KernelParams(const Params& params, const Maxima& maxima)
    : Params(params),
      rows(int64_t(batch) * seq_q * heads),
      head_blocks(ceil_div(heads / groups, kBlockHeads)),
      group_count(groups),
      split_count(splits),
      query_count(seq_q),
      scale_log2(std::fmax(std::fabs(sm_scale) * kLog2E, std::numeric_limits<float>::denorm_min())),
      negate_q(sm_scale < 0),
      maxima(maxima) {
  items = batch * seq_q * groups * splits * head_blocks;
}

// What the instances for keys in pages take.
struct PagedParams : KernelParams {
  PagedParams(const Params& params, const Pages& pages, float empty_lse)
      : KernelParams(params, {nullptr, nullptr, empty_lse}), pages(pages), page_slots(pages.page) {}

  Pages pages;
  cutlass::FastDivmod page_slots;
};

// One work item; the same for all threads.
struct Item {
  int head_block, group, s, b, split;
  int first_tile, tiles;  // at least one tile, perhaps without a visible key
  int slot_end;           // slots below this are in use
  VisibleIds ids;

  __device__ __forceinline__ Item(const KernelParams& p, int index) {
    p.head_blocks(index, head_block, index);
    p.group_count(index, group, index);
    p.split_count(index, split, index);
    p.query_count(b, s, index);
    const int slots = used_slots(p, b, s);
    const int all_tiles = ceil_div(slots, kBlockK);
    first_tile = p.split_count.div(split * all_tiles);
    const int end_tile = p.split_count.div((split + 1) * all_tiles);
    tiles = end_tile > first_tile ? end_tile - first_tile : 1;
    slot_end = end_tile * kBlockK < slots ? end_tile * kBlockK : slots;
    ids = visible_ids(p, b, s);
  }

  __device__ __forceinline__ const int* indices(const KernelParams& p) const {
    return p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
  }
  // Row of [batch, seq_q, heads] of this item's first head.
  __device__ __forceinline__ int64_t first_row(const KernelParams& p) const {
    return (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + group * (p.heads / p.groups) + head_block * kBlockHeads;
  }
  __device__ __forceinline__ int heads_left(const KernelParams& p) const {
    return p.heads / p.groups - head_block * kBlockHeads;
  }
};

}  // namespace dsa::sparse_mla_fwd
