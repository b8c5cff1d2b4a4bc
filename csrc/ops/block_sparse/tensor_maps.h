// Host side of TMA for blocks.
#pragma once

#include "ops/block_sparse/params.h"
#include "sm90/tensor_map.h"

namespace dsa::block_sparse {

// A box is one block by 64 columns. Returns false when the driver refuses.
inline bool encode_blocks(CUtensorMap* map, const Heads& t, const Problem& p, int heads, int positions) {
  return sm90::encode_head_tensor(
      map, {t.data, p.columns, heads, 1, positions, p.batch, t.stride_h, 0, t.stride_n, t.stride_b},
      {.heads = 1, .positions = kBlock});
}

}  // namespace dsa::block_sparse
