// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::indexer_loss {

struct Params {
  const float* scores;                                                // [rows, slots]
  const float* p;                                                     // [rows, slots]
  const bool* valid;                                                  // [rows, slots] or null
  const float* row_weights;                                           // [rows] or null
  float* loss;                                                        // [rows], contiguous
  float* dscores;                                                     // [rows, slots], contiguous
  int64_t scores_stride, p_stride, valid_stride, row_weights_stride;  // in elements
  int rows, slots;
  int device;  // CUDA device index
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::indexer_loss
