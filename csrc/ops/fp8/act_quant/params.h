// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::act_quant {

inline constexpr int kBlock = 128;  // columns that share a scale

struct Params {
  const void* x;  // bf16 or fp32 [rows, columns]
  void* y;        // e4m3 [rows, columns], contiguous
  float* scales;  // [columns / kBlock, rows], in elements:
  int64_t scales_block_stride, scales_row_stride;
  int64_t row_stride;  // of x, in elements
  int64_t rows, columns;
  int device;  // CUDA device index
  bool is_bf16, round_scale;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::act_quant
