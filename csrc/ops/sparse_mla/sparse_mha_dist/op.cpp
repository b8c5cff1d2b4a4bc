// dsa::sparse_mha_dist on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mha.md.
#include <cstdint>
#include <optional>

#include "ops/sparse_mla/sparse_mha/inputs.h"
#include "ops/sparse_mla/sparse_mha_dist/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mha_dist {
namespace {

using namespace dsa::sparse_mha;

constexpr char kOp[] = "dsa::sparse_mha_dist";

Tensor sparse_mha_dist(Tensor q, Tensor k, Tensor k_rope, Tensor indices, Tensor lse, std::optional<double> sm_scale,
                       bool causal, int64_t q_start, std::optional<Tensor> starts, std::optional<Tensor> ends,
                       std::optional<int64_t> window) {
  const Inputs inputs{q, k, k_rope, indices, std::nullopt, sm_scale, causal, q_start, starts, ends, window};
  check_inputs(kOp, inputs);
  check_tensor(kOp, "lse", lse, ScalarType::Float, {{"B", q.size(0)}, {"S", q.size(1)}, {"H", q.size(2)}});
  check_same_device(kOp, "lse", lse, "q", q);
  const DeviceCall call(kOp, "q", q);
  Tensor dist = empty({q.size(0), q.size(1), indices.size(2)}, ScalarType::Float, call.index);
  if (inputs.empty()) return zero_(dist);
  lse = aligned_contiguous(lse);
  const MaskedProblem masked(inputs, call, Bits::kNone);
  Params params{masked.problem};
  params.split = choose_split(params, masked.lists);
  Tensor sums = empty({sums_size(params, params.split)}, ScalarType::Float, call.index);
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.sums = static_cast<float*>(sums.data_ptr());
  params.dist = static_cast<float*>(dist.data_ptr());
  call.check(launch(params, masked.lists, call.stream()));
  return dist;
}

}  // namespace
}  // namespace dsa::sparse_mha_dist

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("sparse_mha_dist", TORCH_BOX(&dsa::sparse_mha_dist::sparse_mha_dist));
}
