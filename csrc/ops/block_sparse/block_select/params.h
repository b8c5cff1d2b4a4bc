// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::block_select {

inline constexpr int kMaxBlocks = 16384;  // per row

struct Params {
  const void* scores;                                 // fp32 or bf16 [batch, heads, q_blocks, blocks]
  int* index;                                         // [rows, slots], contiguous
  int* num;                                           // [rows], contiguous
  int64_t batch_stride, head_stride, q_block_stride;  // of the scores, in elements
  double tau, max_ratio, ratio_range;                 // ratio_range: max_ratio - min_ratio
  int rows, heads, q_blocks, blocks;
  int slots;       // no row keeps more
  int topk;        // 0: mass and Gini coefficient decide
  int min_blocks;  // at most `blocks`
  int device;      // CUDA device index
  bool is_bf16;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::block_select
