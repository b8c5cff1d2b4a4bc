// The checks that the hyper-connection operators share: of x and of the parameters of the gates.
#pragma once

#include <optional>

#include "torch/abi.h"

namespace dsa::mhc {

// x must be bf16 [B, S, n, D] with sizes that the kernels support.
void check_streams(const char* op, const Tensor& x);

// The other arguments, given a checked x.
void check_parameters(const char* op, const Tensor& x, const Tensor& phi, const Tensor& alpha,
                      const std::optional<Tensor>& gamma, double eps);

}  // namespace dsa::mhc
