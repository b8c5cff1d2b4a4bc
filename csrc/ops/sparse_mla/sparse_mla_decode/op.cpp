// dsa::sparse_mla_decode on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mla_decode.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/shared/list_lengths/buffers.h"
#include "ops/sparse_mla/packed_keys.h"
#include "ops/sparse_mla/sparse_mla_decode/params.h"
#include "ops/sparse_mla/sparse_mla_decode/plan.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_decode {
namespace {

constexpr char kOp[] = "dsa::sparse_mla_decode";
constexpr int64_t kMaxHeads = 128, kValueColumns = 512;

void check_inputs(const Tensor& q, const Tensor& kv_cache, const Tensor& indices, std::optional<double> sm_scale,
                  int64_t d_v, const std::optional<Tensor>& topk_length, const std::optional<Tensor>& attn_sink) {
  check_tensor(kOp, "q", q, ScalarType::BFloat16, {{"B"}, {"N"}, {"H"}, {"Dqk"}});
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), d_qk = q.size(3);
  DSA_CHECK((d_qk == 576 || d_qk == 512) && d_v == kValueColumns, kOp,
            ": (Dqk, d_v) must be (576, 512) or (512, 512), got (", d_qk, ", ", d_v, ")");
  if (kv_cache.scalar_type() == ScalarType::Byte) {
    const int64_t bytes = sparse_mla::packed_bytes(static_cast<int>(d_qk));
    check_tensor(kOp, "kv_cache", kv_cache, ScalarType::Byte, {{"blocks"}, {"page"}, {"G", 1}, {"bytes", bytes}});
  } else {
    check_tensor(kOp, "kv_cache", kv_cache, {ScalarType::BFloat16, ScalarType::Byte},
                 {{"blocks"}, {"page"}, {"G", 1}, {"Dqk", d_qk}});
  }
  check_tensor(kOp, "indices", indices, ScalarType::Int, {{"B", batch}, {"N", tokens}, {"K"}});
  if (topk_length) check_tensor(kOp, "topk_length", *topk_length, ScalarType::Int, {{"B", batch}, {"N", tokens}});
  if (attn_sink) check_tensor(kOp, "attn_sink", *attn_sink, ScalarType::Float, {{"H", heads}});
  DSA_CHECK(heads <= kMaxHeads, kOp, ": q must have at most 128 heads, got ", heads);
  DSA_CHECK(indices.size(2) >= 1, kOp, ": indices must have at least one slot per row, got ", describe(indices));
  check_scale(kOp, sm_scale);

  check_rows_aligned(kOp, "q", q);
  check_rows_aligned(kOp, "kv_cache", kv_cache);
  check_slots(kOp, indices);
  check_same_device(kOp, "kv_cache", kv_cache, "q", q);
  check_same_device(kOp, "indices", indices, "q", q);
  if (topk_length) check_same_device(kOp, "topk_length", *topk_length, "q", q);
  if (attn_sink) check_same_device(kOp, "attn_sink", *attn_sink, "q", q);
}

// Sets topk_length like list_lengths::find.
std::optional<Tensor> find_lengths(Params& p, const DeviceCall& call) {
  listed_keys::Problem problem{};
  problem.indices = p.indices;
  problem.topk_length = p.topk_length;
  problem.indices_stride_b = p.indices_stride_b, problem.indices_stride_s = p.indices_stride_n;
  problem.batch = p.batch, problem.seq_q = p.tokens, problem.seq_kv = p.slots;
  problem.groups = 1, problem.topk = p.topk;
  problem.device = p.device;
  std::optional<Tensor> lengths = list_lengths::find(problem, call, list_lengths::kFewestDecodeSlots);
  if (lengths) {
    p.topk_length = problem.topk_length;
    p.topk_length_stride_b = problem.topk_length_stride_b, p.topk_length_stride_n = problem.topk_length_stride_s;
  }
  return lengths;
}

std::tuple<Tensor, Tensor> sparse_mla_decode(Tensor q, Tensor kv_cache, Tensor indices, std::optional<double> sm_scale,
                                             int64_t d_v, std::optional<Tensor> topk_length,
                                             std::optional<Tensor> attn_sink, bool batch_invariant, bool inf_if_empty) {
  check_inputs(q, kv_cache, indices, sm_scale, d_v, topk_length, attn_sink);
  const DeviceCall call(kOp, "q", q);

  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), d_qk = q.size(3);
  Tensor out = empty({batch, tokens, heads, d_v}, ScalarType::BFloat16, call.index);
  Tensor lse = empty({batch, tokens, heads}, ScalarType::Float, call.index);
  if (batch * tokens * heads == 0) return {out, lse};

  const int topk = static_cast<int>(indices.size(2));
  const bool is_packed = kv_cache.scalar_type() == ScalarType::Byte;
  const Plan plan = make_plan(batch * tokens, static_cast<int>(heads), topk, call.num_sms, is_packed, batch_invariant);
  std::optional<Tensor> parts;  // out, then units, then lse: one allocation costs the host less than three
  float *partial_out = nullptr, *partial_lse = nullptr, *partial_unit = nullptr;
  if (plan.splits > 1) {
    const int64_t rows = plan.splits * batch * tokens * heads;
    const bool is_fp16 = is_wide(plan, is_packed);
    const int64_t row_floats = is_fp16 ? d_v / 2 : d_v, units = is_fp16 ? sparse_mla::kScaleGroups : 0;
    parts = empty({rows * (row_floats + 1 + units)}, ScalarType::Float, call.index);
    partial_out = static_cast<float*>(parts->data_ptr());
    partial_unit = partial_out + rows * row_floats;
    partial_lse = partial_unit + rows * units;
  }
  const int64_t element = static_cast<int64_t>(kv_cache.element_size());
  Params params{
      .q = q.data_ptr(),
      .kv_cache = kv_cache.data_ptr(),
      .indices = static_cast<const int*>(indices.data_ptr()),
      .topk_length = topk_length ? static_cast<const int*>(topk_length->data_ptr()) : nullptr,
      .attn_sink = attn_sink ? static_cast<const float*>(attn_sink->data_ptr()) : nullptr,
      .q_stride_b = q.stride(0),
      .q_stride_n = q.stride(1),
      .q_stride_h = q.stride(2),
      .page_bytes = kv_cache.stride(0) * element,
      .slot_bytes = kv_cache.stride(1) * element,
      .indices_stride_b = indices.stride(0),
      .indices_stride_n = indices.stride(1),
      .topk_length_stride_b = topk_length ? topk_length->stride(0) : 0,
      .topk_length_stride_n = topk_length ? topk_length->stride(1) : 0,
      .attn_sink_stride = attn_sink ? attn_sink->stride(0) : 0,
      .batch = static_cast<int>(batch),
      .tokens = static_cast<int>(tokens),
      .heads = static_cast<int>(heads),
      .topk = topk,
      .d_qk = static_cast<int>(d_qk),
      .page = static_cast<int>(kv_cache.size(1)),
      .slots = static_cast<int>(std::min<int64_t>(kv_cache.size(0) * kv_cache.size(1), INT32_MAX)),
      .is_packed = is_packed,
      .device = call.index,
      .num_sms = call.num_sms,
      .sm_scale = static_cast<float>(sm_scale ? *sm_scale : 1.0 / std::sqrt(static_cast<double>(d_qk))),
      .empty_lse = inf_if_empty ? INFINITY : -INFINITY,
      .plan = plan,
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr()),
      .partial_out = partial_out,
      .partial_lse = partial_lse,
      .partial_unit = partial_unit,
  };
  const std::optional<Tensor> lengths = find_lengths(params, call);
  call.check(launch(params, call.stream()));
  return {out, lse};
}

}  // namespace
}  // namespace dsa::sparse_mla_decode

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("sparse_mla_decode", TORCH_BOX(&dsa::sparse_mla_decode::sparse_mla_decode));
}
