// dsa::sparse_mla_bwd on CUDA: argument checks, allocation, launch. docs/sparse_mla_bwd.md has the maths.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/sparse_mla/inputs.h"
#include "ops/sparse_mla_bwd/config.h"
#include "ops/sparse_mla_bwd/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_bwd {
namespace {

using namespace dsa::sparse_mla;

// Bytes of sums above which CTAs keep in step, so that those in use stay in L2; and above which even so they often
// come from memory.
constexpr int64_t kKeepInStep = 32 << 20, kPrefetch = 192 << 20;
constexpr char kOp[] = "dsa::sparse_mla_bwd";

std::tuple<Tensor, Tensor, Tensor> sparse_mla_bwd(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse,
                                                  Tensor indices, std::optional<double> sm_scale, int64_t d_v,
                                                  bool causal, int64_t q_start, int64_t kv_stride,
                                                  std::optional<Tensor> topk_length, std::optional<Tensor> attn_sink,
                                                  std::optional<Tensor> dlse, bool deterministic) {
  const Options options{sm_scale, d_v, causal, q_start, kv_stride, topk_length, attn_sink};
  check_inputs(kOp, q, kv, indices, options);
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  const int64_t seq_kv = kv.size(1), groups = kv.size(2);
  const auto check_like_forward = [&](const char* name, const Tensor& tensor, ScalarType dtype, bool is_row) {
    if (is_row) {
      check_tensor(kOp, name, tensor, dtype, {{"B", batch}, {"S", seq_q}, {"H", heads}, {"Dv", d_v}});
    } else {
      check_tensor(kOp, name, tensor, dtype, {{"B", batch}, {"S", seq_q}, {"H", heads}});
    }
    check_same_device(kOp, name, tensor, "q", q);
  };
  check_like_forward("dout", dout, ScalarType::BFloat16, true);
  check_like_forward("out", out, ScalarType::BFloat16, true);
  check_like_forward("lse", lse, ScalarType::Float, false);
  if (dlse) check_like_forward("dlse", *dlse, ScalarType::Float, false);
  const Device device = hopper_device(kOp, q);
  const int device_index = q.get_device_index();
  const DeviceGuard guard(device_index);

  // Gradients come in any layout, often expanded from one element.
  dout = aligned_contiguous(dout);
  out = aligned_contiguous(out);
  lse = aligned_contiguous(lse);
  if (dlse) dlse = aligned_contiguous(*dlse);

  Tensor dq = empty({batch, seq_q, heads, d_qk}, ScalarType::BFloat16, device_index);
  Tensor dkv = empty({batch, seq_kv, groups, d_qk}, ScalarType::BFloat16, device_index);
  Tensor d_sink = empty({attn_sink ? heads : 0}, ScalarType::Float, device_index);
  const int64_t items = batch * seq_q * groups * ((heads / groups + kBlockHeads - 1) / kBlockHeads);
  const Plan plan = plan_items(items, static_cast<int>(indices.size(3)), device.num_sms);
  Tensor dq_parts = empty({items - plan.whole, plan.parts, kBlockHeads, d_qk}, ScalarType::Float, device_index);
  Tensor sink_terms = empty({attn_sink ? batch * seq_q * heads : 0}, ScalarType::Float, device_index);
  // dkv is summed in fp32, or in 64-bit fixed point, whose sums do not depend on the order of the additions.
  Tensor dkv_sum =
      empty({batch, seq_kv, groups, d_qk}, deterministic ? ScalarType::Long : ScalarType::Float, device_index);
  std::optional<Tensor> addend_bound, key_sizes, lost_keys;
  if (deterministic) {
    addend_bound = empty({1}, ScalarType::Float, device_index);
    key_sizes = empty({batch, seq_kv, groups}, ScalarType::Float, device_index);
    lost_keys = empty({batch, seq_kv, groups}, ScalarType::Byte, device_index);
  }
  // Each head block of each query adds at most once to a key's sum, but for ids listed twice, whose P share a total
  // of 1.
  const int64_t addends = std::max<int64_t>(1, seq_q * ((heads / groups + kBlockHeads - 1) / kBlockHeads));
  const float addend_limit = std::ldexp(1.f, 62 - static_cast<int>(std::ceil(std::log2(static_cast<double>(addends)))));
  const int64_t sum_bytes = dkv_sum.numel() * static_cast<int64_t>(dkv_sum.element_size());
  Tensor steps = empty({1}, ScalarType::Int, device_index);

  const Params params{
      .dout = dout.data_ptr(),
      .q = q.data_ptr(),
      .kv = kv.data_ptr(),
      .out = out.data_ptr(),
      .lse = static_cast<const float*>(lse.data_ptr()),
      .dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr,
      .indices = static_cast<const int*>(indices.data_ptr()),
      .topk_length = topk_length ? static_cast<const int*>(topk_length->data_ptr()) : nullptr,
      .attn_sink = attn_sink ? static_cast<const float*>(attn_sink->data_ptr()) : nullptr,
      .dq = dq.data_ptr(),
      .dkv = dkv.data_ptr(),
      .d_sink = static_cast<float*>(d_sink.data_ptr()),
      .dq_parts = static_cast<float*>(dq_parts.data_ptr()),
      .sink_terms = static_cast<float*>(sink_terms.data_ptr()),
      .steps = sum_bytes > kKeepInStep ? static_cast<int*>(steps.data_ptr()) : nullptr,
      .dkv_sum = dkv_sum.data_ptr(),
      .addend_bound = deterministic ? static_cast<float*>(addend_bound->data_ptr()) : nullptr,
      .key_sizes = deterministic ? static_cast<float*>(key_sizes->data_ptr()) : nullptr,
      .lost_keys = deterministic ? static_cast<unsigned char*>(lost_keys->data_ptr()) : nullptr,
      .addend_limit = addend_limit,
      .q_stride_b = row_stride(q, 0),
      .q_stride_s = row_stride(q, 1),
      .q_stride_h = row_stride(q, 2),
      .kv_stride_b = row_stride(kv, 0),
      .kv_stride_s = row_stride(kv, 1),
      .kv_stride_g = row_stride(kv, 2),
      .indices_stride_b = indices.stride(0),
      .indices_stride_s = indices.stride(1),
      .indices_stride_g = indices.stride(2),
      .topk_length_stride_b = topk_length ? topk_length->stride(0) : 0,
      .topk_length_stride_s = topk_length ? topk_length->stride(1) : 0,
      .attn_sink_stride = attn_sink ? attn_sink->stride(0) : 0,
      .batch = static_cast<int>(batch),
      .seq_q = static_cast<int>(seq_q),
      .seq_kv = static_cast<int>(seq_kv),
      .heads = static_cast<int>(heads),
      .groups = static_cast<int>(groups),
      .topk = static_cast<int>(indices.size(3)),
      .d_qk = static_cast<int>(d_qk),
      .d_v = static_cast<int>(d_v),
      .whole_items = static_cast<int>(plan.whole),
      .parts = plan.parts,
      .device = device_index,
      .num_sms = device.num_sms,
      .deterministic = deterministic,
      .prefetch_sums = sum_bytes > kPrefetch,
      .causal = causal,
      .q_start = q_start,
      .positions_per_key = kv_stride,
      .sm_scale = score_scale(options, d_qk),
  };
  const char* error = launch(params, current_stream(device_index));
  DSA_CHECK(error == nullptr, kOp, ": launch failed: ", error);
  return {dq, dkv, d_sink};
}

}  // namespace
}  // namespace dsa::sparse_mla_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mla_bwd", TORCH_BOX(&dsa::sparse_mla_bwd::sparse_mla_bwd)); }
