// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/sparse_mha/params.h"

namespace dsa::sparse_mha_fwd {

struct Params : sparse_mha::Problem {
  sparse_mha::Heads out;  // [batch, seq_q, heads, kValueColumns], contiguous
  float* lse;             // [batch, seq_q, heads], contiguous; natural logarithm; -inf of a query without keys
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::sparse_mha_fwd
