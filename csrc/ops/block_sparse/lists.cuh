// Common to the block-sparse kernels: query blocks, their lists, and tiles of 64 rows in shared memory.
#pragma once

#include "ops/block_sparse/params.h"
#include "sm90/memory.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"

namespace dsa::block_sparse {

// A block of one head, of `blocks` per head.
struct Item {
  int block, head, batch;

  __device__ __forceinline__ Item(int index, int blocks, int heads)
      : block(index % blocks), head(index / blocks % heads), batch(index / blocks / heads) {}

  // First row of its head in [batch, heads, seq_q].
  __device__ __forceinline__ int64_t row(const Problem& p) const {
    return (static_cast<int64_t>(batch) * p.heads + head) * p.seq_q;
  }
};

struct List {
  const int* g_ids;
  int count;
};

// Of a query block: where the ids of its list are, and their number.
__device__ __forceinline__ const int* listed_ids(const Problem& p, const Item& item) {
  return p.index + item.batch * p.index_stride_b + item.head * p.index_stride_h + item.block * p.index_stride_m;
}
__device__ __forceinline__ const int* listed_number(const Problem& p, const Item& item) {
  return p.num + item.batch * p.num_stride_b + item.head * p.num_stride_h + item.block * p.num_stride_m;
}

// Run by one warp. Prefetches up to 1024 ids to L2 while the count is read, one cache line per lane.
__device__ __forceinline__ List listed_blocks(const Problem& p, const Item& item) {
  const int* g_ids = listed_ids(p, item);
  constexpr int kIdsPerLane = 128 / sizeof(int);
  const int lane = threadIdx.x % sm90::kWarpThreads;
  if (lane * kIdsPerLane < p.slots) sm90::prefetch_l2(g_ids + lane * kIdsPerLane);
  return {g_ids, max(0, min(__ldg(listed_number(p, item)), p.slots))};
}

// The number of keys of a block that are visible, its first ones; 0 for a block that does not exist.
__device__ __forceinline__ int valid_keys(const Problem& p, int id) {
  if (!tiles::VisibleIds{0, p.kv_blocks}.has(id)) return 0;
  const int here = min(kBlock, p.seq_kv - id * kBlock);
  return p.sizes == nullptr ? here : max(0, min(here, __ldg(p.sizes + id * p.sizes_stride)));
}

// Loads 64 rows from `position` on; `full` must expect their bytes. Run by one thread.
template <int kColumns>
__device__ __forceinline__ void copy_block(tiles::Bf16* tile, const CUtensorMap* map, int head, int position, int batch,
                                           uint64_t* full) {
#pragma unroll
  for (int chunk = 0; chunk < kColumns / tiles::kChunkColumns; ++chunk) {
    sm90::tma_load(tile + chunk * tiles::kChunkElements, map, {chunk * tiles::kChunkColumns, head, 0, position, batch},
                   full);
  }
}

// The same; also arrives on `full` and sets the expected bytes.
template <int kColumns>
__device__ __forceinline__ void load_block(tiles::Bf16* tile, const CUtensorMap* map, int head, int position, int batch,
                                           uint64_t* full) {
  sm90::arrive_and_expect(full, kBlock * kColumns * sizeof(tiles::Bf16));
  copy_block<kColumns>(tile, map, head, position, batch, full);
}

// Zeros rows [first, end), for products over rows: rows after the valid ones may hold anything, even NaN. Run by a
// warpgroup, which must then meet at a barrier.
template <int kColumns>
__device__ __forceinline__ void clear_rows(tiles::Bf16* tile, int first, int end, int thread) {
  constexpr int kPieces = 8, kStep = sm90::kWarpgroupThreads / kPieces;  // 16-byte pieces of a row of a chunk
  for (int row = first + thread / kPieces; row < end; row += kStep) {
    char* piece = reinterpret_cast<char*>(tile) + sm90::swizzled_offset(row, thread % kPieces);
#pragma unroll
    for (int chunk = 0; chunk < kColumns / tiles::kChunkColumns; ++chunk) {
      *reinterpret_cast<uint4*>(piece + chunk * tiles::kChunkBytes) = {};
    }
  }
  sm90::fence_async_proxy();
}

}  // namespace dsa::block_sparse
