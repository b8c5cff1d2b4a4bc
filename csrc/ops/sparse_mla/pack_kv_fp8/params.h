// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::pack_kv_fp8 {

struct Params {
  const void* kv;      // bf16 [rows, d_qk]
  void* packed;        // [rows, row_bytes], contiguous
  int64_t row_stride;  // of kv, in elements
  int64_t rows;
  int d_qk;
  int device;  // CUDA device index
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::pack_kv_fp8
