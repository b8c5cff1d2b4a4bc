// Which CTA does what, and where sums are.
#pragma once

#include "params.h"

namespace dsa::sparse_mha_dist {

using namespace dsa::sparse_mha;

inline constexpr int kTileBlocks = 2;  // blocks of keys of a tile

__device__ __host__ __forceinline__ int tiles_of_row(const Params& p) {
  return (p.mask.kv_blocks + kTileBlocks - 1) / kTileBlocks;
}

// A tile, and the heads whose weights a CTA adds up there.
struct Item {
  int batch, block, part;
  int key_block, key_blocks;  // those that have bits: the first one, and how many, 0 to kTileBlocks
  int head, end_head;
};

// CTAs walk through the heads at about the same time, so that in L2 the keys of few heads are needed at a time. Late
// query blocks are first: of a causal mask, those whose heads are divided are then the short rows of tiles.
inline int count_items(const Params& p) {
  const int blocks = p.mask.q_blocks + (p.split.parts - 1) * p.split.blocks;
  return blocks * p.batch * tiles_of_row(p);
}

__device__ __forceinline__ Item item_at(const Params& p, int index) {
  const int in_row = tiles_of_row(p), in_block = p.batch * in_row;  // tiles
  const int whole = (p.mask.q_blocks - p.split.blocks) * in_block;
  const bool is_whole = index < whole;
  if (!is_whole) index -= whole;
  const int in_part = is_whole ? whole : p.split.blocks * in_block, parts = is_whole ? 1 : p.split.parts;
  Item item;
  item.part = index / in_part;
  index %= in_part;
  item.block = (is_whole ? p.mask.q_blocks : p.split.blocks) - 1 - index / in_block;
  item.batch = index % in_block / in_row;
  item.head = p.heads * item.part / parts;
  item.end_head = p.heads * (item.part + 1) / parts;
  const int first = index % in_row * kTileBlocks;
  const int64_t row = int64_t{item.batch} * p.mask.q_blocks + item.block;
  const uint32_t bits = __ldg(p.mask.tiles + row * p.mask.tile_words + first / 32) >> first % 32 & 3;
  item.key_block = first + (bits == 2);
  item.key_blocks = __popc(bits);
  return item;
}

// The sums of a query, with those of key 0 first.
__device__ __forceinline__ float* sums_of_row(const Params& p, int batch, int part, int query) {
  const int64_t rows = int64_t{p.mask.q_blocks} * kBlock, split_rows = int64_t{p.split.blocks} * kBlock;
  const int64_t row =
      part == 0 ? batch * rows + query : p.batch * rows + (int64_t{part - 1} * p.batch + batch) * split_rows + query;
  return p.sums + row * p.mask.kv_blocks * kBlock;
}

}  // namespace dsa::sparse_mha_dist
