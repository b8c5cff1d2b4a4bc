// The arguments that the block-sparse operators share, and their checks.
#pragma once

#include <optional>

#include "ops/block_sparse/params.h"
#include "torch/abi.h"

namespace dsa::block_sparse {

struct Inputs {
  const Tensor &q, &k, &v, &q2k_index, &q2k_num;
  const std::optional<Tensor>& kv_block_size;
  std::optional<double> sm_scale;
};

// All checks that need no device, so that they are tested without one. `op` is the qualified operator name.
void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale);
void check_inputs(const char* op, const Inputs& inputs);

// The kernel parameters of a [batch, heads, positions, columns] tensor.
Heads heads_of(const Tensor& tensor);
// Without lists.
Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale,
                   const DeviceCall& call);
Problem problem_of(const Inputs& inputs, const DeviceCall& call);

// A gradient, which arrives in any layout, often expanded from one element: itself if its rows can be copied like those
// of the arguments, else a copy.
Tensor with_aligned_rows(const Tensor& tensor);

}  // namespace dsa::block_sparse
