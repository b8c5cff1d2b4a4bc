// Tensor maps of the arguments.
#pragma once

#include "ops/sparse_mla/sparse_mha/params.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mha {

// A box is `rows` positions of one head by 64 columns. Returns false when the driver refuses.
inline bool encode_rows(CUtensorMap* map, const Heads& t, const Problem& p, int columns, int heads, int positions,
                        int rows) {
  return sm90::encode_head_tensor(
      map, {t.data, columns, heads, 1, positions, p.batch, t.stride_h, 0, t.stride_s, t.stride_b},
      {.heads = 1, .positions = rows});
}

}  // namespace dsa::sparse_mha
