// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::mhc_pre_bwd {

struct Params {
  // All contiguous; [tokens, ..] except the parameters. gamma may be null.
  const void *x, *dh_in;  // bf16
  const float *dh_post, *dh_res, *phi, *alpha, *gamma, *h_post, *inv_rms, *h_mix, *h_pre;
  void* dx;  // bf16
  float *dphi, *dalpha, *dbias, *dgamma;
  float eps;

  // Scratch.
  float*
      terms;  // [2, mixed, tokens]: gradients of the arguments of the gates; the same times what alpha multiplies there
  void*
      dh_mix;  // bf16 [2, padded_tokens, pitch]: rounded part and remainder, zero-padded; then 4 more numbers per token
  float* parts;  // [runs, mixed, streams * columns]: sums over a run of tokens

  int tokens, streams, columns, runs;
  int padded_tokens;  // a multiple of kTokens
  int device;         // CUDA device index
};

inline constexpr int kTokens = 32, kColumns = 128;  // of a tile of x, which has all streams

// Of columns_kernel.
constexpr int ctas_per_sm(int streams) { return streams == 2 ? 2 : 1; }

// Columns of a row of dh_mix in scratch: a multiple of 16 plus 8, which avoids bank conflicts between rows and has room
// for 4 more numbers.
constexpr int pitch_of(int streams) { return (streams * streams + 2 * streams + 15) / 16 * 16 + 8; }

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::mhc_pre_bwd
