// The arguments that the indexer's operators share, and what must hold of them.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/indexer/indexer_logits/params.h"
#include "torch/abi.h"

namespace dsa::indexer {

struct Scoring {
  Tensor q, k, weights, ks, ke;
  std::optional<Tensor> k_scale;
};

// Everything that needs no device. `op` is the qualified name. Makes `k_scale` dense.
void check_inputs(const char* op, Scoring& scoring);

// Of the differentiable operators: q and k in bf16, weights.
void check_rows(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights);
// These and `indices`.
void check_listed(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices);

// What the kernel is told of queries [first, first + count), whose logits are rows of `logits`.
indexer_logits::Params params_of(const Scoring& scoring, int64_t first, int64_t count, const Tensor& logits,
                                 const DeviceCall& call);

}  // namespace dsa::indexer
