// dsa::sparse_mla_fwd on CUDA: argument checks, allocation, launch. docs/sparse_mla_fwd.md has the
// maths.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/sparse_mla_fwd/params.h"
#include "ops/sparse_mla_fwd/plan.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_fwd {
namespace {

constexpr char kOp[] = "dsa::sparse_mla_fwd";
constexpr int64_t kMaxHeadsPerGroup = 128;
constexpr int64_t kValueColumns = 512;

struct Options {
  std::optional<double> sm_scale;
  int64_t d_v;
  bool causal;
  int64_t q_start, kv_stride;
  std::optional<Tensor> topk_length, attn_sink;
};

// Everything that needs no device, so that it is tested without one.
void check(const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options) {
  check_tensor(kOp, "q", q, ScalarType::BFloat16, {{"B"}, {"S"}, {"H"}, {"Dqk"}});
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  check_tensor(kOp, "kv", kv, ScalarType::BFloat16, {{"B", batch}, {"S_kv"}, {"G"}, {"Dqk", d_qk}});
  const int64_t groups = kv.size(2);
  check_tensor(kOp, "indices", indices, ScalarType::Int, {{"B", batch}, {"S", seq_q}, {"G", groups}, {"K"}});
  if (options.topk_length) {
    check_tensor(kOp, "topk_length", *options.topk_length, ScalarType::Int, {{"B", batch}, {"S", seq_q}});
  }
  if (options.attn_sink) check_tensor(kOp, "attn_sink", *options.attn_sink, ScalarType::Float, {{"H", heads}});

  DSA_CHECK((d_qk == 576 || d_qk == 512) && options.d_v == kValueColumns, kOp,
            ": (Dqk, d_v) must be (576, 512) or (512, 512), got (", d_qk, ", ", options.d_v, ")");
  DSA_CHECK(groups >= 1 && heads % groups == 0 && heads / groups <= kMaxHeadsPerGroup, kOp,
            ": q's heads must be a multiple of kv's groups, at most 128 a group, got ", heads, " heads and ", groups,
            " groups");
  DSA_CHECK(indices.size(3) >= 1, kOp, ": indices must have at least one slot a row, got ", describe(indices));
  if (options.sm_scale) {
    DSA_CHECK(std::isfinite(static_cast<float>(*options.sm_scale)), kOp, ": sm_scale must be finite in fp32, got ",
              *options.sm_scale);
  }
  DSA_CHECK(options.q_start >= 0, kOp, ": q_start must be at least 0, got ", options.q_start);
  DSA_CHECK(options.kv_stride >= 1, kOp, ": kv_stride must be at least 1, got ", options.kv_stride);

  check_rows_aligned(kOp, "q", q);
  check_rows_aligned(kOp, "kv", kv);
  DSA_CHECK(kv.size(1) <= 1 || kv.stride(1) < (int64_t{1} << 31), kOp,
            ": kv's positions must be less than 2^31 elements apart, got a stride of ", kv.stride(1));
  check_last_stride(kOp, "indices", indices);
  check_same_device(kOp, "kv", kv, "q", q);
  check_same_device(kOp, "indices", indices, "q", q);
  if (options.topk_length) check_same_device(kOp, "topk_length", *options.topk_length, "q", q);
  if (options.attn_sink) check_same_device(kOp, "attn_sink", *options.attn_sink, "q", q);
  DSA_CHECK(q.is_cuda(), kOp, ": q must be on a CUDA device, got ", describe_device(q));
}

// The stride of a dimension of one element is never used to step; views leave anything there,
// tensor maps want a multiple of 16 bytes.
int64_t step(const Tensor& tensor, int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : tensor.size(3); }

std::tuple<Tensor, Tensor> sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, std::optional<double> sm_scale,
                                          int64_t d_v, bool causal, int64_t q_start, int64_t kv_stride,
                                          std::optional<Tensor> topk_length, std::optional<Tensor> attn_sink) {
  check(q, kv, indices, {sm_scale, d_v, causal, q_start, kv_stride, topk_length, attn_sink});
  const int device_index = q.get_device_index();
  const Device device = device_info(device_index);
  DSA_CHECK(device.capability == 90, kOp, ": needs a Hopper GPU (sm_90), got sm_", device.capability, " on ",
            describe_device(q));
  const DeviceGuard guard(device_index);

  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  const int64_t groups = kv.size(2), topk = indices.size(3);
  Tensor out = empty({batch, seq_q, heads, d_v}, ScalarType::BFloat16, device_index);
  Tensor lse = empty({batch, seq_q, heads}, ScalarType::Float, device_index);
  if (batch * seq_q * heads == 0) return {out, lse};

  const int64_t head_blocks = (heads / groups + kBlockHeads - 1) / kBlockHeads;
  const int splits = plan_splits(batch * seq_q * groups * head_blocks, static_cast<int>(topk), device.num_sms);
  std::optional<Tensor> partial_out, partial_lse;
  if (splits > 1) {
    partial_out = empty({splits, batch, seq_q, heads, d_v}, ScalarType::Float, device_index);
    partial_lse = empty({splits, batch, seq_q, heads}, ScalarType::Float, device_index);
  }

  const Params params{
      .q = q.data_ptr(),
      .kv = kv.data_ptr(),
      .indices = static_cast<const int*>(indices.data_ptr()),
      .topk_length = topk_length ? static_cast<const int*>(topk_length->data_ptr()) : nullptr,
      .attn_sink = attn_sink ? static_cast<const float*>(attn_sink->data_ptr()) : nullptr,
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr()),
      .partial_out = partial_out ? static_cast<float*>(partial_out->data_ptr()) : nullptr,
      .partial_lse = partial_lse ? static_cast<float*>(partial_lse->data_ptr()) : nullptr,
      .q_stride_b = step(q, 0),
      .q_stride_s = step(q, 1),
      .q_stride_h = step(q, 2),
      .kv_stride_b = step(kv, 0),
      .kv_stride_s = step(kv, 1),
      .kv_stride_g = step(kv, 2),
      .indices_stride_b = indices.stride(0),
      .indices_stride_s = indices.stride(1),
      .indices_stride_g = indices.stride(2),
      .topk_length_stride_b = topk_length ? topk_length->stride(0) : 0,
      .topk_length_stride_s = topk_length ? topk_length->stride(1) : 0,
      .attn_sink_stride = attn_sink ? attn_sink->stride(0) : 0,
      .batch = static_cast<int>(batch),
      .seq_q = static_cast<int>(seq_q),
      .seq_kv = static_cast<int>(kv.size(1)),
      .heads = static_cast<int>(heads),
      .groups = static_cast<int>(groups),
      .topk = static_cast<int>(topk),
      .d_qk = static_cast<int>(d_qk),
      .d_v = static_cast<int>(d_v),
      .splits = splits,
      .device = device_index,
      .num_sms = device.num_sms,
      .causal = causal,
      .q_start = q_start,
      .positions_per_key = kv_stride,
      .sm_scale = static_cast<float>(sm_scale ? *sm_scale : 1.0 / std::sqrt(static_cast<double>(d_qk))),
  };
  const char* error = launch(params, current_stream(device_index));
  DSA_CHECK(error == nullptr, kOp, ": launch failed: ", error);
  return {out, lse};
}

}  // namespace
}  // namespace dsa::sparse_mla_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mla_fwd", TORCH_BOX(&dsa::sparse_mla_fwd::sparse_mla_fwd)); }
