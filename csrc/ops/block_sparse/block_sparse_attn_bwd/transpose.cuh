// Transposes lists of keys by query block into lists of queries by key block. A CTA has some key blocks of one head.
// Each warp, with a run of query blocks, counts who lists them and, once its offsets are known, writes in order.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "params.h"
#include "tiles/visibility.cuh"

namespace dsa::block_sparse_attn_bwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kTransposeWarps = 32, kTransposeThreads = kTransposeWarps * kWarpThreads;
inline constexpr int kRange = 64;  // key blocks per CTA

constexpr int ranges(int kv_blocks) { return (kv_blocks + kRange - 1) / kRange; }

// Calls found(row, id) for the visible blocks that rows [begin, end) of a head list, row by row. Run by one warp.
template <class Found>
__device__ __forceinline__ void for_listed_blocks(const Params& p, Item item, int begin, int end, const Found& found) {
  constexpr int kAhead = 4;
  for (item.block = begin; item.block < end; ++item.block) {
    const List list = listed_blocks(p, item);
    for (int first = threadIdx.x % kWarpThreads; first < list.count; first += kAhead * kWarpThreads) {
      int ids[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int slot = first + i * kWarpThreads;
        ids[i] = slot < list.count ? __ldg(list.g_ids + slot) : -1;
      }
#pragma unroll
      for (int id : ids) {
        if (valid_keys(p, id) > 0) found(item.block, id);
      }
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kTransposeThreads, 1) transpose_kernel(const __grid_constant__ Params p) {
  __shared__ int places[kTransposeWarps][kRange];  // counts, then the index of a warp's next entry
  __shared__ int sums[kRange];
  __shared__ int before;  // entries of blocks below the range
  if (blockIdx.x == 0 && threadIdx.x < 2) p.taken[threadIdx.x] = 0;
  const Item head(static_cast<int>(blockIdx.x) / ranges(p.kv_blocks) * p.q_blocks, p.q_blocks, p.heads);
  const int first_block = static_cast<int>(blockIdx.x) % ranges(p.kv_blocks) * kRange;
  const int64_t head_index = static_cast<int64_t>(head.batch) * p.heads + head.head;
  int* g_listing = p.listing + head_index * p.q_blocks * p.slots;
  const VisibleIds own{first_block, first_block + kRange};
  const int warp = threadIdx.x / kWarpThreads;
  const auto first_row = [&](int warp_index) {
    return static_cast<int>(static_cast<int64_t>(warp_index) * p.q_blocks / kTransposeWarps);
  };
  for (int i = threadIdx.x; i < kTransposeWarps * kRange; i += kTransposeThreads) places[i / kRange][i % kRange] = 0;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();

  int below = 0;
  for_listed_blocks(p, head, first_row(warp), first_row(warp + 1), [&](int, int id) {
    below += id < first_block;
    if (own.has(id)) atomicAdd(&places[warp][id - first_block], 1);
  });
  below = __reduce_add_sync(~0u, below);
  if (threadIdx.x % kWarpThreads == 0) atomicAdd(&before, below);
  __syncthreads();
  if (threadIdx.x < kRange) {
    int sum = 0;
    for (int i = 0; i < kTransposeWarps; ++i) sum += places[i][threadIdx.x];
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kRange) {
    int place = before;
    for (int i = 0; i < threadIdx.x; ++i) place += sums[i];
    int* g_offsets = p.offsets + head_index * (p.kv_blocks + 1) + first_block + threadIdx.x;
    if (first_block + threadIdx.x < p.kv_blocks) *g_offsets = place;
    for (int i = 0; i < kTransposeWarps; ++i) {
      const int count = places[i][threadIdx.x];
      places[i][threadIdx.x] = place;
      place += count;
    }
    if (first_block + threadIdx.x == p.kv_blocks - 1) g_offsets[1] = place;
  }
  __syncthreads();
  // A block that a row lists twice takes two entries; their order does not matter.
  for_listed_blocks(p, head, first_row(warp), first_row(warp + 1), [&](int row, int id) {
    if (own.has(id)) g_listing[atomicAdd(&places[warp][id - first_block], 1)] = row;
  });
}

}  // namespace dsa::block_sparse_attn_bwd
