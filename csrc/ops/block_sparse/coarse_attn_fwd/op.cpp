// dsa::coarse_attn_fwd on CUDA: argument checks, allocation, launch. Math: docs/block_sparse/coarse_attn.md.
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/block_sparse/coarse_attn_fwd/params.h"
#include "ops/block_sparse/inputs.h"
#include "torch/abi.h"

namespace dsa::coarse_attn_fwd {
namespace {

using namespace dsa::block_sparse;

constexpr char kOp[] = "dsa::coarse_attn_fwd";

std::tuple<Tensor, Tensor, Tensor> coarse_attn_fwd(Tensor q, Tensor k, Tensor v, std::optional<double> sm_scale) {
  check_heads(kOp, q, k, v, sm_scale);
  const DeviceCall call(kOp, "q", q);

  Params params{problem_of(q, k, v, sm_scale, call)};
  Tensor out = empty_rows_like(q, call.index);
  Tensor lse = empty({q.size(0), q.size(1), q.size(2)}, ScalarType::Float, call.index);
  Tensor scores = empty({q.size(0), q.size(1), params.q_blocks, k.size(2)}, ScalarType::Float, call.index);
  if (lse.numel() == 0) return {out, lse, scores};
  if (k.size(2) == 0) return {zero_(out), fill_(lse, -INFINITY), scores};

  params.out = heads_of(out);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.scores = static_cast<float*>(scores.data_ptr());
  const bool fits_at_once = int64_t{params.batch} * params.heads * params.q_blocks <= call.num_sms;
  params.triples = fits_at_once ? 0 : params.q_blocks / kGroups;
  call.check(launch(params, call.stream()));
  return {out, lse, scores};
}

}  // namespace
}  // namespace dsa::coarse_attn_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("coarse_attn_fwd", TORCH_BOX(&dsa::coarse_attn_fwd::coarse_attn_fwd));
}
