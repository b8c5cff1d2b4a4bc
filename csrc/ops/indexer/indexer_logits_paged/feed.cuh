// Tiles of keys on their way to shared memory.
#pragma once

#include <cuda.h>

#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "storage.cuh"

namespace dsa::indexer_logits_paged {

using namespace dsa::sm90;

// Where a tile comes from.
struct TileSource {
  Tile tile;
  int block, first;  // its block of the cache, and its first key there
  const float* g_scales;
};

// The page of a sequence that a tile is part of.
__device__ __forceinline__ int page_of(const KernelParams& p, int tile) {
  const int tiles = page_tiles(p);
  return tiles == 1 ? tile : tile / tiles;
}

// The block that holds a tile of a sequence, as the table has it.
__device__ __forceinline__ int block_of(const KernelParams& p, int sequence, int tile) {
  if (p.block_table == nullptr) return 0;
  return p.block_table[sequence * p.table_stride_b + page_of(p, tile) * p.table_stride_page];
}

template <class Element, Config kC>
__device__ __forceinline__ TileSource source_of(const KernelParams& p, int tile, int block) {
  const bool exists = static_cast<unsigned>(block) < static_cast<unsigned>(p.blocks);
  const int page = page_of(p, tile), first = (tile - page * page_tiles(p)) * kTileKeys;
  const int first_key = page * p.page + first, end = first_key + min(kTileKeys, p.page - first);
  const float* g_scales = p.k_scale;
  if (kIsFp8<Element> && g_scales == nullptr) {
    const auto* g_block = static_cast<const char*>(p.k_cache) + block * p.cache_stride_block;
    g_scales = reinterpret_cast<const float*>(g_block + p.page * int64_t{kC.row_bytes});
  }
  return {{first_key, exists ? end : 0, min(end, p.columns)}, block, first, g_scales + first};
}

// Loads a tile into stage `slot`. Called by one lane.
template <class Element, Config kC>
__device__ __forceinline__ void load_tile(SharedStorage<Element, kC>& shared, const CUtensorMap& k_map, int slot,
                                          const TileSource& source) {
  constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element);
  shared.tiles[slot] = source.tile;
  if (source.tile.keys_end == 0) {
    arrive(&shared.tile_full[slot]);
    return;
  }
  int scale_bytes = 0;
  if constexpr (kIsFp8<Element>) {
    // Bulk copies take multiples of 16 bytes, as the scales of a cache's page are; those of a single page may not be.
    const int keys = source.tile.keys_end - source.tile.first_key, whole = keys / 4 * 4;
#pragma unroll 1
    for (int key = whole; key < keys; ++key) shared.scales[slot][key] = source.g_scales[key];
    scale_bytes = whole * sizeof(float);
  }
  arrive_and_expect(&shared.tile_full[slot], kC.tile_bytes() + scale_bytes);
  for (int c = 0; c < kC.chunks(); ++c) {
    tma_load(shared.keys[slot] + c * kTileKeys * kChunkColumns, &k_map,
             {c * kChunkColumns, source.first, 0, source.block, 0}, &shared.tile_full[slot]);
  }
  if (scale_bytes > 0) bulk_load(shared.scales[slot], source.g_scales, scale_bytes, &shared.tile_full[slot]);
}

// Loads the tiles of the CTA's run in turn with the other feeding warps. Run by one warp.
template <class Element, Config kC>
__device__ __forceinline__ void feed(SharedStorage<Element, kC>& shared, const KernelParams& p,
                                     const CUtensorMap& k_map, const Run& run, int feeder) {
  constexpr int kOwnStages = kC.stages() / kFeeders;
  const int lane = threadIdx.x % 32;
  Ring<kC.stages()> ring;
  ring.advance(feeder);
  int turn = feeder;  // tiles of the sequence before this warp's first
  walk(run, p, [&](const Sequence& sequence) {
    const int end = sequence.end_tile;
    // As many tiles as the warp has stages are looked up at a time, each by a lane, and loaded one after the other.
    const auto look_up = [&](int tile) {
      return lane < kOwnStages && tile < end ? block_of(p, sequence.index, tile) : -1;
    };
    int own = sequence.first_tile + turn + lane * kFeeders, block = look_up(own);
    for (int first = sequence.first_tile + turn; first < end; first += kC.stages(), own += kC.stages()) {
      const TileSource source = source_of<Element, kC>(p, own, block);
      block = look_up(own + kC.stages());
      for (int i = 0; i < kOwnStages && first + i * kFeeders < end; ++i, ring.advance(kFeeders)) {
        wait(&shared.tile_empty[ring.slot], ring.parity ^ 1);
        if (lane == i) load_tile(shared, k_map, ring.slot, source);
        __syncwarp();
      }
    }
    turn = (turn + kFeeders - (end - sequence.first_tile) % kFeeders) % kFeeders;
  });
}

}  // namespace dsa::indexer_logits_paged
