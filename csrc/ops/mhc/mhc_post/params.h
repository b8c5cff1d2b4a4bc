// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

namespace dsa::mhc_post {

inline constexpr int kMaxIterations = 100;  // Sinkhorn iterations

struct Params {
  const void *x, *y;            // bf16 [tokens, streams, columns], [tokens, columns]; all are contiguous
  const float *h_post, *h_res;  // [tokens, streams], [tokens, streams, streams]
  const void* dout;             // bf16, like x; gradients only
  void* out;                    // bf16: the result, or dx
  void* dy;
  float *dh_post, *dh_res;
  float* mixing;  // scratch [tokens, streams, streams]: weights after the last iteration
  int tokens, streams, columns, iterations;
  int device;  // CUDA device index
};

// Launch on `stream` (a cudaStream_t). Return null, or a text that says what failed.
const char* launch_fwd(const Params& params, void* stream);
const char* launch_bwd(const Params& params, void* stream);

}  // namespace dsa::mhc_post
