// The arguments that sparse_mla_fwd, sparse_mla_bwd and attn_dist share, and their checks.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/sparse_mla/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mla {

struct Options {
  std::optional<double> sm_scale;
  std::optional<int64_t> d_v;  // only of operators that read values
  bool causal;
  int64_t q_start, positions_per_key;
  std::optional<Tensor> topk_length, starts, ends, attn_sink;
};

// All checks that need no device, so that they are tested without one. `op` is the qualified operator name.
void check_inputs(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options);

// The kernel parameters that follow from the arguments. `call` is on q's device.
Problem problem_of(const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options,
                   const DeviceCall& call);

}  // namespace dsa::sparse_mla
