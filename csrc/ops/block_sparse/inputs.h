// The arguments that the operators between blocks of queries and of keys share, and what must hold of them.
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

// Everything that needs no device, so that it is tested without one. `op` is the qualified name.
void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale);
void check_inputs(const char* op, const Inputs& inputs);

// What the kernels are told of [batch, heads, positions, columns].
Heads heads_of(const Tensor& tensor);
// Without lists.
Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale,
                   const DeviceCall& call);
Problem problem_of(const Inputs& inputs, const DeviceCall& call);

// A gradient, which comes in any layout, often expanded from one element: itself where its rows can be copied as those
// of the arguments are, else a copy.
Tensor with_aligned_rows(const Tensor& tensor);

}  // namespace dsa::block_sparse
