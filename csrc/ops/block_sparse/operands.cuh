// Blocks of rows in registers: wgmma operands, and results on their way to global memory.
#pragma once

#include "ops/block_sparse/params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::block_sparse {

// A block in registers, as the A operand of products over columns.
template <int kColumns>
using RowsOperand = decltype(cute::make_tensor<tiles::Bf16>(
    cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kColumns / 16>>{}));

// Calls use(step, pairs) for each step of 16 columns with this lane's four pairs: rows r, r + 8, r, r + 8 with r =
// thread / 32 * 16 + lane / 4, the latter two 8 columns further.
template <int kColumns, class Use>
__device__ __forceinline__ void for_operand_pairs(const tiles::Bf16* tile, int thread, const Use& use) {
  const int row = thread / sm90::kWarpThreads * 16 + thread % 16, piece = thread / 16 % 2;
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    uint32_t pairs[4];
    sm90::load_matrices(
        sm90::shared_address(tile + i / 4 * tiles::kChunkElements) + sm90::swizzled_offset(row, i % 4 * 2 + piece),
        pairs);
    use(i, pairs);
  }
}

template <class Fragment>
__device__ __forceinline__ auto& pairs_of(Fragment& r) {
  return *reinterpret_cast<uint32_t (*)[sizeof(r) / 16][4]>(r.data());
}

// Calls hide(i) for each element i of this thread's part of 64 x 64 scores that is in a column from `keys` on.
template <class Scores, class Hide>
__device__ __forceinline__ void for_columns_from(int keys, const Scores& r_s, int thread, const Hide& hide) {
  const int left = keys - thread % 4 * 2;  // from this lane's first column on
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) {
    if (tiles::column_of_value(i, 0) >= left) hide(i);
  }
}

// Uses register operands after the loop whose products all read them. Without a use, ptxas 13.0 may consider them dead
// after the first iteration and reuse their registers: wrong results without any warning.
template <class Fragment>
__device__ __forceinline__ void use_operand(const Fragment& r) {
  uint32_t mixed = 0;
#pragma unroll
  for (uint32_t word : *reinterpret_cast<const uint32_t (*)[sizeof(r) / 4]>(r.data())) mixed ^= word;
  sm90::use(mixed);
}

// This warpgroup's barrier, recomputed so that no register is held for it.
__device__ __forceinline__ int own_barrier() {
  return 1 + sm90::recomputed(static_cast<int>(threadIdx.x)) / sm90::kWarpgroupThreads;
}

// Stores a tile that the warpgroup's threads have written to the rows from `position` on. The warpgroup may release the
// tile after its thread 0 has waited for the store's reads.
template <int kColumns>
__device__ __forceinline__ void store_tile(const CUtensorMap* map, tiles::Bf16* tile, int head, int position, int batch,
                                           int thread) {
  sm90::fence_async_proxy();
  sm90::sync_warpgroup(own_barrier());
  if (thread != 0) return;
#pragma unroll
  for (int chunk = 0; chunk < kColumns / tiles::kChunkColumns; ++chunk) {
    sm90::tma_store(map, tile + chunk * tiles::kChunkElements,
                    {chunk * tiles::kChunkColumns, head, 0, position, batch});
  }
  sm90::tma_store_commit();
}

// The same for the accumulators of a block, rounded, which are staged in `tile`.
template <int kColumns, class Accumulators>
__device__ __forceinline__ void store_block(const CUtensorMap* map, tiles::Bf16* tile, int head, int position,
                                            int batch, const Accumulators& r_rows, int thread) {
  tiles::store_accumulators<kColumns>(sm90::shared_address(tile), r_rows, thread);
  store_tile<kColumns>(map, tile, head, position, batch, thread);
}

}  // namespace dsa::block_sparse
