// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/params.h"

namespace dsa::sparse_mla_fwd {

struct Params : sparse_mla::Problem {
  void* out;           // bf16 [batch, seq_q, heads, d_v], contiguous
  float* lse;          // [batch, seq_q, heads], contiguous
  float* partial_out;  // [splits, batch, seq_q, heads, d_v] when splits > 1, else null
  float* partial_lse;  // [splits, batch, seq_q, heads] when splits > 1, else null
  int splits;          // from plan_splits
};

// The largest scores, if they are asked for, and what lse of a row without keys is.
struct Maxima {
  float* max_logits;   // like lse, or null: then `empty_lse` must be -inf
  float* partial_max;  // like partial_lse, or null
  float empty_lse;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, const Maxima& maxima, void* stream);

}  // namespace dsa::sparse_mla_fwd
