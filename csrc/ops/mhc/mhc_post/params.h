// What crosses from the host to the kernels. No torch, no CUDA headers.
#pragma once

namespace dsa::mhc_post {

inline constexpr int kMaxIterations = 100;  // of Sinkhorn's rounds

struct Params {
  const void *x, *y;            // bf16 [tokens, streams, columns], [tokens, columns], contiguous, as all
  const float *h_post, *h_res;  // [tokens, streams], [tokens, streams, streams]
  const void* dout;             // bf16 as x; of the gradients alone
  void* out;                    // bf16: the result, or dx
  void* dy;
  float *dh_post, *dh_res;
  float* mixing;  // scratch [tokens, streams, streams]: weights behind the last round
  int tokens, streams, columns, iterations;
  int device;  // index of the one that runs the kernel
};

// Launch on `stream` (a cudaStream_t). Return null, or a text that says what failed.
const char* launch_fwd(const Params& params, void* stream);
const char* launch_bwd(const Params& params, void* stream);

}  // namespace dsa::mhc_post
