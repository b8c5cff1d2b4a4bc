// What the operators of hyper-connections ask of x and of the parameters of their gates.
#pragma once

#include <optional>

#include "torch/abi.h"

namespace dsa::mhc {

// x: bf16 [B, S, n, D] of streams that the kernels have.
void check_streams(const char* op, const Tensor& x);

// Beside such an x.
void check_parameters(const char* op, const Tensor& x, const Tensor& phi, const Tensor& alpha,
                      const std::optional<Tensor>& gamma, double eps);

}  // namespace dsa::mhc
