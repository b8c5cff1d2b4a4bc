// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/params.h"

namespace dsa::gated_fusion {

using block_sparse::Heads;

// The kernels treat heads and positions alike: the two may be swapped in all tensors below.
struct Inputs {
  Heads fine, coarse;  // bf16 [batch, heads, positions, columns]
  Heads gate;          // bf16 or fp32 [batch, heads, positions]
  unsigned heads, positions, rows, columns;
  int device;  // CUDA device index
  bool gate_is_bf16;
};

struct Forward {
  Inputs in;
  Heads out;  // like fine
};

struct Backward {
  Inputs in;
  Heads dout, dfine, dcoarse, dgate;  // like the tensors that they are gradients of
};

// Launch on `stream` (a cudaStream_t). Return null, or a text that says what failed.
const char* launch(const Forward& params, void* stream);
const char* launch(const Backward& params, void* stream);

}  // namespace dsa::gated_fusion
