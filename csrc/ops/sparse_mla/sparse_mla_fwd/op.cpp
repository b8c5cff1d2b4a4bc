// dsa::sparse_mla_fwd and sparse_mla_max_fwd on CUDA: argument checks, allocation, launch. Math:
// docs/sparse_mla/sparse_mla_fwd.md.
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/shared/list_lengths/buffers.h"
#include "ops/shared/merged_lists/buffers.h"
#include "ops/sparse_mla/inputs.h"
#include "ops/sparse_mla/sparse_mla_fwd/params.h"
#include "ops/sparse_mla/sparse_mla_fwd/plan.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_fwd {
namespace {

using namespace dsa::sparse_mla;

// `merges_lists`: whether the lists of neighboring queries may be merged, where that pays; last bits of a query then
// depend on its neighbors. With `max_logits`, which is then allocated, lse of rows without keys is `empty_lse`; else
// -inf.
std::tuple<Tensor, Tensor> forward(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices,
                                   const Options& options, bool merges_lists, std::optional<Tensor>* max_logits,
                                   float empty_lse) {
  check_inputs(op, q, kv, indices, options);
  const DeviceCall call(op, "q", q);

  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_v = *options.d_v;
  const int64_t groups = kv.size(2), topk = indices.size(3);
  Tensor out = empty({batch, seq_q, heads, d_v}, ScalarType::BFloat16, call.index);
  Tensor lse = empty({batch, seq_q, heads}, ScalarType::Float, call.index);
  if (max_logits != nullptr) *max_logits = empty({batch, seq_q, heads}, ScalarType::Float, call.index);
  if (batch * seq_q * heads == 0) return {out, lse};

  const int64_t head_blocks = (heads / groups + kBlockHeads - 1) / kBlockHeads;
  const int splits = plan_splits(batch * seq_q * groups * head_blocks, static_cast<int>(topk), call.num_sms);
  std::optional<Tensor> partial_out, partial_lse, partial_max;
  if (splits > 1) {
    partial_out = empty({splits, batch, seq_q, heads, d_v}, ScalarType::Float, call.index);
    partial_lse = empty({splits, batch, seq_q, heads}, ScalarType::Float, call.index);
    if (max_logits != nullptr) partial_max = empty({splits, batch, seq_q, heads}, ScalarType::Float, call.index);
  }
  const auto floats = [](const std::optional<Tensor>& tensor) {
    return tensor ? static_cast<float*>(tensor->data_ptr()) : nullptr;
  };

  Params params{problem_of(q, kv, indices, options, call)};
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.partial_out = floats(partial_out);
  params.partial_lse = floats(partial_lse);
  params.splits = splits;
  const std::optional<Tensor> lengths = list_lengths::find(params, call);
  if (merges_lists &&
      merged_lists::are_merged_forward(params.heads, groups, batch, seq_q, topk, params.seq_kv, call.num_sms)) {
    merged_lists::Lists lists{};
    const Tensor buffer = merged_lists::allocate(params, merged_lists::kMostForwardPercent, lists);
    call.check(launch_merging(params, lists, call.stream()));
    return {out, lse};
  }
  const Maxima maxima{max_logits != nullptr ? floats(*max_logits) : nullptr, floats(partial_max), empty_lse};
  call.check(launch(params, maxima, call.stream()));
  return {out, lse};
}

std::tuple<Tensor, Tensor> sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, std::optional<double> sm_scale,
                                          int64_t d_v, bool causal, int64_t q_start, int64_t positions_per_key,
                                          std::optional<Tensor> topk_length, std::optional<Tensor> starts,
                                          std::optional<Tensor> ends, std::optional<Tensor> attn_sink,
                                          bool deterministic) {
  const Options options{sm_scale, d_v, causal, q_start, positions_per_key, topk_length, starts, ends, attn_sink};
  return forward("dsa::sparse_mla_fwd", q, kv, indices, options, !deterministic, nullptr, -INFINITY);
}

std::tuple<Tensor, Tensor, Tensor> sparse_mla_max_fwd(Tensor q, Tensor kv, Tensor indices,
                                                      std::optional<double> sm_scale, int64_t d_v, bool causal,
                                                      int64_t q_start, int64_t positions_per_key,
                                                      std::optional<Tensor> topk_length, std::optional<Tensor> starts,
                                                      std::optional<Tensor> ends, std::optional<Tensor> attn_sink,
                                                      bool /*deterministic: the backward*/, bool inf_if_empty) {
  const Options options{sm_scale, d_v, causal, q_start, positions_per_key, topk_length, starts, ends, attn_sink};
  std::optional<Tensor> max_logits;
  auto [out, lse] = forward("dsa::sparse_mla_max_fwd", q, kv, indices, options, false, &max_logits,
                            inf_if_empty ? INFINITY : -INFINITY);
  return {out, lse, *max_logits};
}

}  // namespace
}  // namespace dsa::sparse_mla_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("sparse_mla_fwd", TORCH_BOX(&dsa::sparse_mla_fwd::sparse_mla_fwd));
  m.impl("sparse_mla_max_fwd", TORCH_BOX(&dsa::sparse_mla_fwd::sparse_mla_max_fwd));
}
