// The arguments that the indexer's operators share, and their checks.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/indexer/indexer_logits/params.h"
#include "torch/abi.h"

namespace dsa::indexer {

struct Scoring {
  Tensor q, k, weights, starts, ends;
  std::optional<Tensor> k_scale;
};

// All checks that need no device. `op` is the qualified operator name. Makes `k_scale` dense.
void check_inputs(const char* op, Scoring& scoring);

// For the differentiable operators: q and k in bf16, weights.
void check_rows(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights);
// The same and `indices`.
void check_listed(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices);

void check_heads(const char* op, int64_t heads, int64_t dim);

// Kernel parameters for queries [first, first + count), whose logits are the rows of `logits`.
indexer_logits::Params params_of(const Scoring& scoring, int64_t first, int64_t count, const Tensor& logits,
                                 const DeviceCall& call);

}  // namespace dsa::indexer
