// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/sparse_mla/sparse_mha/mask.h"
#include "ops/sparse_mla/sparse_mha/params.h"

namespace dsa::sparse_mha_dist {

// The tiles of the first `blocks` query blocks, which come last, are computed in `parts` parts of the heads, if there
// would be too few of them for all SMs.
struct Split {
  int parts = 1;  // at most as many as heads
  int blocks = 0;
};

// Of the problem, v and the bits of the mask are not used, only mask.tiles.
struct Params : sparse_mha::Problem {
  const float* lse;  // [batch, seq_q, heads], contiguous; natural logarithm
  Split split;
  float* sums;  // workspace of sums_size(...) floats, aligned to 16 bytes
  float* dist;  // [batch, seq_q, topk], contiguous
};

// What suits the lists.
Split choose_split(const sparse_mha::Problem& problem, const sparse_mha::Lists& lists);

// The sums of all tiles: part 0, [batch, q_blocks * 128, kv_blocks * 128], then the other parts,
// [parts - 1, batch, split.blocks * 128, kv_blocks * 128].
inline int64_t sums_size(const sparse_mha::Problem& p, const Split& split) {
  const int64_t blocks = p.mask.q_blocks + (split.parts - 1) * split.blocks;
  return p.batch * blocks * sparse_mha::kBlock * p.mask.kv_blocks * sparse_mha::kBlock;
}

// The two kernels, and both. Launch on `stream` (a cudaStream_t). Return null, or a text that says what failed.
const char* launch_tiles(const Params& params, void* stream);
const char* launch_gather(const Params& params, const sparse_mha::Lists& lists, void* stream);
const char* launch(const Params& params, const sparse_mha::Lists& lists, void* stream);

}  // namespace dsa::sparse_mha_dist
