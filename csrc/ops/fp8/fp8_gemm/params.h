// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::fp8_gemm {

inline constexpr int kBlock = 128;   // columns, and rows of b, that share a scale
inline constexpr int kMaxRows = 64;  // rows of a per launch, for which b is streamed once

struct Params {
  const char* a;  // e4m3 [rows, columns]
  const void* b;  // e4m3 [width, columns]
  const float *a_scales, *b_scales;
  char* out;                   // bf16 [rows, width], contiguous
  int64_t a_stride, b_stride;  // between rows, in elements
  int64_t a_scales_stride_row, a_scales_stride_block, b_scales_stride_row, b_scales_stride_block;
  int rows, width, columns;
  int device;  // CUDA device index
  int num_sms;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::fp8_gemm
