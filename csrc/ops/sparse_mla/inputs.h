// The arguments that sparse_mla_fwd, sparse_mla_bwd and attn_dist share, and what must hold of them.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/sparse_mla/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mla {

struct Options {
  std::optional<double> sm_scale;
  std::optional<int64_t> d_v;  // of an operator that reads values
  bool causal;
  int64_t q_start, positions_per_key;
  std::optional<Tensor> topk_length, attn_sink;
};

// Everything that needs no device, so that it is tested without one. `op` is the qualified name.
void check_inputs(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options);

// What the kernels are told of them. `call.index` is that of `device`, which q is on.
Problem problem_of(const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options,
                   const DeviceCall& call);

}  // namespace dsa::sparse_mla
