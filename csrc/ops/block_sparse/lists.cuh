// What the kernels of block-sparse attention share: query blocks, their lists, and tiles of 64 rows in shared memory.
#pragma once

#include "ops/block_sparse/params.h"
#include "sm90/gather.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::block_sparse {

// A block of one head, of `blocks` each.
struct Item {
  int block, head, batch;

  __device__ __forceinline__ Item(int index, int blocks, int heads)
      : block(index % blocks), head(index / blocks % heads), batch(index / blocks / heads) {}

  // Where the rows of its head begin in [batch, heads, seq_q].
  __device__ __forceinline__ int64_t row(const Problem& p) const {
    return (static_cast<int64_t>(batch) * p.heads + head) * p.seq_q;
  }
};

struct List {
  const int* g_ids;
  int count;
};

__device__ __forceinline__ List listed_blocks(const Problem& p, const Item& item) {
  const int count =
      __ldg(p.num + item.batch * p.num_stride_b + item.head * p.num_stride_h + item.block * p.num_stride_m);
  return {p.index + item.batch * p.index_stride_b + item.head * p.index_stride_h + item.block * p.index_stride_m,
          max(0, min(count, p.slots))};
}

// Keys of a block that may be seen: its first ones. None of a block that does not exist.
__device__ __forceinline__ int valid_keys(const Problem& p, int id) {
  if (!sm90::is_visible(id, p.kv_blocks)) return 0;
  const int here = min(kBlock, p.seq_kv - id * kBlock);
  return p.sizes == nullptr ? here : max(0, min(here, __ldg(p.sizes + id * p.sizes_stride)));
}

// Copies 64 rows from `position` on. By one thread.
template <int kColumns>
__device__ __forceinline__ void load_block(sm90::Bf16* tile, const CUtensorMap* map, int head, int position, int batch,
                                           uint64_t* full) {
  sm90::arrive_and_expect(full, kBlock * kColumns * 2);
#pragma unroll
  for (int chunk = 0; chunk < kColumns / sm90::kChunkColumns; ++chunk) {
    sm90::tma_load(tile + chunk * sm90::kChunkElements, map, {chunk * sm90::kChunkColumns, head, 0, position, batch},
                   full);
  }
}

// Zeros from row `first` on, for products over rows: what stands behind the valid ones may be anything, NaN too. By a
// warpgroup.
template <int kColumns>
__device__ __forceinline__ void clear_rows(sm90::Bf16* tile, int first, int barrier, int thread) {
  constexpr int kPieces = 8;  // of 16 bytes, of a row of a chunk
  for (int i = first * kPieces + thread; i < kBlock * kPieces; i += sm90::kWarpgroupThreads) {
    for (int chunk = 0; chunk < kColumns / sm90::kChunkColumns; ++chunk) {
      char* rows = reinterpret_cast<char*>(tile + chunk * sm90::kChunkElements);
      *reinterpret_cast<uint4*>(rows + sm90::swizzled_offset(i / kPieces, i % kPieces)) = {};
    }
  }
  sm90::fence_async_proxy();
  sm90::sync_warpgroup(barrier);
}

}  // namespace dsa::block_sparse
