// dsa::sparse_mha_fwd on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mha.md.
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/sparse_mla/sparse_mha/inputs.h"
#include "ops/sparse_mla/sparse_mha_fwd/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mha_fwd {
namespace {

using namespace dsa::sparse_mha;

constexpr char kOp[] = "dsa::sparse_mha_fwd";

std::tuple<Tensor, Tensor> sparse_mha_fwd(Tensor q, Tensor k, Tensor k_rope, Tensor v, Tensor indices,
                                          std::optional<double> sm_scale, bool causal, int64_t q_start,
                                          std::optional<Tensor> starts, std::optional<Tensor> ends,
                                          std::optional<int64_t> window) {
  const Inputs inputs{q, k, k_rope, indices, v, sm_scale, causal, q_start, starts, ends, window};
  check_inputs(kOp, inputs);
  const DeviceCall call(kOp, "q", q);
  Tensor out = empty({q.size(0), q.size(1), q.size(2), kValueColumns}, ScalarType::BFloat16, call.index);
  Tensor lse = empty({q.size(0), q.size(1), q.size(2)}, ScalarType::Float, call.index);
  if (inputs.empty()) return {zero_(out), fill_(lse, -INFINITY)};
  const MaskedProblem masked(inputs, call, Bits::kKeys);
  Params params{masked.problem};
  params.out = heads_of(out);
  params.lse = static_cast<float*>(lse.data_ptr());
  call.check(launch(params, call.stream()));
  return {out, lse};
}

}  // namespace
}  // namespace dsa::sparse_mha_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mha_fwd", TORCH_BOX(&dsa::sparse_mha_fwd::sparse_mha_fwd)); }
