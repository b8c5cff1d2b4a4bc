// The work items of the sparse MLA decode kernels.
#pragma once

#include <cutlass/fast_math.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "divisor.h"
#include "ops/sparse_mla/packed_keys.h"
#include "params.h"
#include "sm90/math.cuh"
#include "tiles/mma.cuh"

namespace dsa::sparse_mla_decode {

using namespace dsa::sm90;
using namespace dsa::sparse_mla;
using namespace dsa::tiles;

inline constexpr int kValueColumns = 512;
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads
__device__ __forceinline__ int value_barrier(bool back) { return back ? kBackBarrier : kFrontBarrier; }

// Values derived from Params once, on the host.
struct KernelParams : Params {
  explicit KernelParams(const Params& params);

  // Where the key of a slot of the cache begins.
  __device__ __forceinline__ const char* key(int slot) const {
    const uint32_t page = page_slots.quotient(slot), in_page = slot - page * page_slots.divisor;
    return static_cast<const char*>(kv_cache) + uint64_t{page} * page_bytes + uint64_t{in_page} * slot_bytes;
  }

  int64_t rows;                                               // batch * tokens * heads
  int items;                                                  // (token, part, block of heads)
  cutlass::FastDivmod head_blocks, split_count, token_count;  // to decode an item's index
  Divisor page_slots;
  float scale_log2;  // |sm_scale| * log2(e); above zero so that masked scores stay -inf
  bool negate_q;     // sm_scale is negative
};

inline KernelParams::KernelParams(const Params& params)
    : Params(params),
      rows(int64_t(batch) * tokens * heads),
      head_blocks(int(ceil_div(heads, plan.block_heads))),
      split_count(plan.splits),
      token_count(tokens),
      page_slots(page > 0 ? page : 1),
      scale_log2(std::fmax(std::fabs(sm_scale) * kLog2E, std::numeric_limits<float>::denorm_min())),
      negate_q(sm_scale < 0) {
  items = batch * tokens * plan.splits * int(ceil_div(heads, plan.block_heads));
}

// One work item; the same for all threads.
struct Item {
  int head_block, split, n, b;
  int first_tile, tiles;  // at least one tile, perhaps without a key
  int slot_end;           // slots of the list below this are the item's

  __device__ __forceinline__ Item(const KernelParams& p, int index) {
    p.head_blocks(index, head_block, index);
    p.split_count(index, split, index);
    p.token_count(b, n, index);
    int slots = p.topk;
    if (p.topk_length != nullptr) {
      const int length = p.topk_length[b * p.topk_length_stride_b + n * p.topk_length_stride_n];
      slots = max(0, min(length, slots));
    }
    const int all_tiles = (slots + kTileKeys - 1) / kTileKeys;
    first_tile = p.split_count.div(split * all_tiles);
    const int end_tile = p.split_count.div((split + 1) * all_tiles);
    tiles = end_tile > first_tile ? end_tile - first_tile : 1;
    slot_end = min(end_tile * kTileKeys, slots);
  }

  // The number of the item's tiles, if they have kKeys keys; at least one, perhaps without a key.
  template <int kKeys>
  __device__ __forceinline__ int tiles_of() const {
    return max(1, (slot_end - first_tile * kTileKeys + kKeys - 1) / kKeys);
  }
  __device__ __forceinline__ const int* indices(const KernelParams& p) const {
    return p.indices + b * p.indices_stride_b + n * p.indices_stride_n;
  }
  __device__ __forceinline__ int first_head(const KernelParams& p) const { return head_block * p.plan.block_heads; }
  // Row of [batch, tokens, heads] of this item's first head.
  __device__ __forceinline__ int64_t first_row(const KernelParams& p) const {
    return (static_cast<int64_t>(b) * p.tokens + n) * p.heads + first_head(p);
  }
  __device__ __forceinline__ int heads_left(const KernelParams& p) const { return p.heads - first_head(p); }
};

}  // namespace dsa::sparse_mla_decode
