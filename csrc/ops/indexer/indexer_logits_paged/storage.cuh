// What is in shared memory.
#pragma once

#include "ops/indexer/indexer_logits/heads.cuh"
#include "sequences.cuh"

namespace dsa::indexer_logits_paged {

using indexer_logits::kIsFp8;

// The keys of a tile. Written by the feeding warp.
struct alignas(16) Tile {
  int first_key;   // in the sequence; the tile's columns of the logits begin there
  int keys_end;    // keys before it have been loaded, none if their block does not exist
  int column_end;  // where the columns end
};

template <class Element, Config kC>
struct SharedStorage {
  alignas(1024) Element q[kC.q_slots()][kC.max_passes][kC.pass_bytes() / sizeof(Element)];
  alignas(1024) Element keys[kC.stages()][kC.tile_bytes() / sizeof(Element)];
  alignas(16) float scales[kIsFp8<Element> ? kC.stages() : 1][kTileKeys];
  // For each 16 rows of Q, four words for each lane of a quad, as sum_heads takes them.
  alignas(16) float weights[kC.q_slots()][kC.max_rows()];
  Tile tiles[kC.stages()];
  KeyRun seen[kC.q_slots()][kC.max_queries()];
  Sequence sequences[kC.q_slots()];
  RunStorage plan;
  alignas(8) uint64_t q_full[kC.q_slots()], q_empty[kC.q_slots()], tile_full[kC.stages()], tile_empty[kC.stages()];
};

}  // namespace dsa::indexer_logits_paged
