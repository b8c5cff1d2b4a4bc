// What crosses from the host to the kernels. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::mhc_pre_bwd {

struct Params {
  // All contiguous; [tokens, ..] but for the parameters. gamma may be null.
  const void *x, *dh_in;  // bf16
  const float *dh_post, *dh_res, *phi, *alpha, *gamma, *h_post, *inv_rms, *h_mix, *h_pre;
  void* dx;  // bf16
  float *dphi, *dalpha, *dbias, *dgamma;
  float eps;

  // Scratch.
  float*
      terms;  // [2, mixed, tokens]: gradients of the sums that the gates are functions of, and times what alpha scales
  void*
      dh_mix;  // bf16 [2, padded_tokens, pitch]: rounded, and what that leaves out; zeros, and more of the token behind
  float* parts;  // sums over a run of tokens [runs, mixed, streams * columns]

  int tokens, streams, columns, runs;
  int padded_tokens;  // up to a multiple of kTokens
  int device;         // index of the one that runs the kernels
};

inline constexpr int kTokens = 32, kColumns = 128;  // of a tile of x, which has all streams

// That go by columns.
constexpr int ctas_per_sm(int streams) { return streams == 2 ? 2 : 1; }

// Columns of a row of dh_mix in scratch: a multiple of 16, and 8, so that rows do not share banks, for 4 numbers more.
constexpr int pitch_of(int streams) { return (streams * streams + 2 * streams + 15) / 16 * 16 + 8; }

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::mhc_pre_bwd
