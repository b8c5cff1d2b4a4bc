// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::mhc_pre_fwd {

struct Params {
  const void* x;                            // bf16 [tokens, streams, columns], contiguous
  const float *phi, *alpha, *bias, *gamma;  // contiguous; gamma may be null
  void* h_in;                               // bf16 [tokens, columns]
  float *h_post, *h_res, *inv_rms, *h_mix, *h_pre;
  float eps;
  int tokens, streams, columns;
  int device;  // CUDA device index
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::mhc_pre_fwd
