// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/mhc/limits.h"

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
  float* parts;  // [runs, mixed, streams * columns]: sums over a run of tokens

  // Messages (sm90/messages.cuh), adjacent.
  float* messages;
  int64_t message_bytes;
  float* sums;   // [tiles, slices, kTokens, streams]: of dh_in times x over the slice's columns
  float* gates;  // [tiles, kTokens, pitch / 2]

  int tokens, streams, columns, runs;
  int patience;  // how often a warp looks for messages that do not arrive
  int device;    // CUDA device index
};

inline constexpr int kTokens = 16, kColumns = 128;  // of a tile of x, which has all streams
inline constexpr int kPatience = 1 << 15;           // tens of milliseconds; more with many tiles

// Of columns_kernel.
constexpr int ctas_per_sm(int streams) { return streams == 2 ? 2 : 1; }

// bf16 columns of a row of the gates in scratch: the gradients of h_mix, rounded part and remainder, then room for
// streams + 1 floats. An odd number of 16 bytes, which avoids bank conflicts between rows.
constexpr int pitch_of(int streams) { return ((streams * (streams + 2) / 4 + (streams + 4) / 4) | 1) * 8; }

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::mhc_pre_bwd
