// What crosses from the host to the kernels. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/params.h"

namespace dsa::gated_fusion {

using block_sparse::Heads;

// Heads and positions are alike to the kernels: they may have changed places in all that is here.
struct Inputs {
  Heads fine, coarse;  // bf16 [batch, heads, positions, columns]
  Heads gate;          // bf16 or fp32 [batch, heads, positions]
  unsigned heads, positions, rows, columns;
  int device;  // index of the one that runs the kernel
  bool gate_is_bf16;
};

struct Forward {
  Inputs in;
  Heads out;  // like fine
};

struct Backward {
  Inputs in;
  Heads dout, dfine, dcoarse, dgate;  // like what they are gradients of
};

// Launch on `stream` (a cudaStream_t). Return null, or a text that says what failed.
const char* launch(const Forward& params, void* stream);
const char* launch(const Backward& params, void* stream);

}  // namespace dsa::gated_fusion
