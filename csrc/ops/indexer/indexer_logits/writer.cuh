// Where the multiply warps of indexer_logits put their results.
#pragma once

#include <cstdint>

#include "params.h"

namespace dsa::indexer_logits {

// What a lane writes while its CTA visits tiles of a block: of each part the logits of the key `key`, counted from the
// part's first one, for the queries `query`, `query` + 2 and so on.
struct Visit {
  int block;
  bool has_first_tile, has_last_tile;  // of the block
  int query, key;
};

// Writes logits to the rows of a matrix.
class MatrixWriter {
  float* g_logits_;
  int64_t stride_;

 public:
  __device__ __forceinline__ MatrixWriter(const Params& p, const Visit& visit)
      : g_logits_(p.logits + visit.query * p.logits_stride + visit.key), stride_(p.logits_stride) {}
  // Whether a part is not scored.
  __device__ __forceinline__ bool skips(int /*tile*/, int /*part*/) const { return false; }
  // Query `i` after the lane's first one sees the key, or `visible` says whether it does.
  __device__ __forceinline__ void put(int i, int first_key, int /*key*/, float logit) {
    g_logits_[i * stride_ + first_key] = logit;
  }
  __device__ __forceinline__ void put(int i, int first_key, int /*key*/, float logit, bool visible) {
    g_logits_[i * stride_ + first_key] = visible ? logit : -INFINITY;
  }
  // Called by all multiply threads at the end of a visit.
  __device__ __forceinline__ void finish() {}
};
struct Matrix {
  __device__ __forceinline__ MatrixWriter writer(const Params& p, const Visit& visit) const { return {p, visit}; }
};

}  // namespace dsa::indexer_logits
