// TMA copies of tiles of a head.
#pragma once

#include "ops/sparse_mla/sparse_mha/params.h"
#include "sm90/tma.cuh"
#include "tiles/mma.cuh"

namespace dsa::sparse_mha {

// Loads `kRows` rows of chunks [first, end) of a tile; `full` must expect their bytes. Run by one thread.
template <int kRows>
__device__ __forceinline__ void load_chunks(tiles::Bf16* tile, int first, int end, const CUtensorMap& map, int head,
                                            int position, int batch, uint64_t* full) {
#pragma unroll
  for (int chunk = first; chunk < end; ++chunk) {
    sm90::tma_load(tile + chunk * kRows * tiles::kChunkColumns, &map,
                   {(chunk - first) * tiles::kChunkColumns, head, 0, position, batch}, full);
  }
}

}  // namespace dsa::sparse_mha
