// dsa::sparse_mla_fwd on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mla_fwd.md.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/sparse_mla/inputs.h"
#include "ops/sparse_mla/sparse_mla_fwd/params.h"
#include "ops/sparse_mla/sparse_mla_fwd/plan.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_fwd {
namespace {

using namespace dsa::sparse_mla;

constexpr char kOp[] = "dsa::sparse_mla_fwd";

std::tuple<Tensor, Tensor> sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, std::optional<double> sm_scale,
                                          int64_t d_v, bool causal, int64_t q_start, int64_t positions_per_key,
                                          std::optional<Tensor> topk_length, std::optional<Tensor> starts,
                                          std::optional<Tensor> ends, std::optional<Tensor> attn_sink,
                                          bool /*deterministic: the backward*/) {
  const Options options{sm_scale, d_v, causal, q_start, positions_per_key, topk_length, starts, ends, attn_sink};
  check_inputs(kOp, q, kv, indices, options);
  const DeviceCall call(kOp, "q", q);

  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2);
  const int64_t groups = kv.size(2), topk = indices.size(3);
  Tensor out = empty({batch, seq_q, heads, d_v}, ScalarType::BFloat16, call.index);
  Tensor lse = empty({batch, seq_q, heads}, ScalarType::Float, call.index);
  if (batch * seq_q * heads == 0) return {out, lse};

  const int64_t head_blocks = (heads / groups + kBlockHeads - 1) / kBlockHeads;
  const int splits = plan_splits(batch * seq_q * groups * head_blocks, static_cast<int>(topk), call.num_sms);
  std::optional<Tensor> partial_out, partial_lse;
  if (splits > 1) {
    partial_out = empty({splits, batch, seq_q, heads, d_v}, ScalarType::Float, call.index);
    partial_lse = empty({splits, batch, seq_q, heads}, ScalarType::Float, call.index);
  }

  Params params{problem_of(q, kv, indices, options, call)};
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.partial_out = partial_out ? static_cast<float*>(partial_out->data_ptr()) : nullptr;
  params.partial_lse = partial_lse ? static_cast<float*>(partial_lse->data_ptr()) : nullptr;
  params.splits = splits;
  call.check(launch(params, call.stream()));
  return {out, lse};
}

}  // namespace
}  // namespace dsa::sparse_mla_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mla_fwd", TORCH_BOX(&dsa::sparse_mla_fwd::sparse_mla_fwd)); }
