// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::write_rotated {

// Rows [batch, positions, heads, .], in elements.
struct Rows {
  void* data;
  int64_t stride_b, stride_s, stride_h;
};

struct Params {
  Rows out, x;    // bf16, of so many columns; the same rows only if the pairs keep their layout
  Rows cos, sin;  // bf16, of `pairs` columns
  int64_t rows;   // batch * positions * heads
  int positions, heads, columns;
  int first, pairs;  // the first column of the pairs, and their number
  bool interleaved, interleaved_out;
  int device;  // CUDA device index
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::write_rotated
