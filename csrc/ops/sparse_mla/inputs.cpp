#include "ops/sparse_mla/inputs.h"

#include <array>
#include <cmath>
#include <utility>

namespace dsa::sparse_mla {
namespace {

constexpr int64_t kMaxHeadsPerGroup = 128;
constexpr int64_t kValueColumns = 512;
constexpr int64_t kMaxStart = int64_t{1} << 62;  // so that no query's position overflows

}  // namespace

void check_inputs(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options) {
  check_tensor(op, "q", q, ScalarType::BFloat16, {{"B"}, {"S"}, {"H"}, {"Dqk"}});
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  check_tensor(op, "kv", kv, ScalarType::BFloat16, {{"B", batch}, {"S_kv"}, {"G"}, {"Dqk", d_qk}});
  const int64_t groups = kv.size(2);
  check_tensor(op, "indices", indices, ScalarType::Int, {{"B", batch}, {"S", seq_q}, {"G", groups}, {"K"}});
  const std::array<std::pair<const char*, const std::optional<Tensor>&>, 3> rows{
      {{"topk_length", options.topk_length}, {"starts", options.starts}, {"ends", options.ends}}};
  for (const auto& [name, row] : rows) {
    if (row) check_tensor(op, name, *row, ScalarType::Int, {{"B", batch}, {"S", seq_q}});
  }
  if (options.attn_sink) check_tensor(op, "attn_sink", *options.attn_sink, ScalarType::Float, {{"H", heads}});

  const bool is_width = d_qk == 576 || d_qk == 512;
  if (options.d_v) {
    DSA_CHECK(is_width && *options.d_v == kValueColumns, op, ": (Dqk, d_v) must be (576, 512) or (512, 512), got (",
              d_qk, ", ", *options.d_v, ")");
  } else {
    DSA_CHECK(is_width, op, ": Dqk must be 576 or 512, got ", d_qk);
  }
  DSA_CHECK(groups >= 1 && heads % groups == 0 && heads / groups <= kMaxHeadsPerGroup, op,
            ": q's heads must be a multiple of kv's groups, at most 128 per group, got ", heads, " heads and ", groups,
            " groups");
  DSA_CHECK(indices.size(3) >= 1, op, ": indices must have at least one slot per row, got ", describe(indices));
  check_scale(op, options.sm_scale);
  DSA_CHECK(options.q_start >= 0 && options.q_start <= kMaxStart, op, ": q_start must be from 0 to 2^62, got ",
            options.q_start);
  DSA_CHECK(options.starts.has_value() == options.ends.has_value(), op, ": starts and ends must be given together");
  DSA_CHECK(!options.starts || options.q_start == 0, op, ": q_start must be 0 with starts and ends, got ",
            options.q_start);
  DSA_CHECK(options.positions_per_key >= 1, op, ": positions_per_key must be at least 1, got ",
            options.positions_per_key);
  DSA_CHECK(!options.starts || options.positions_per_key == 1, op,
            ": positions_per_key must be 1 with starts and ends, got ", options.positions_per_key);

  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "kv", kv);
  DSA_CHECK(kv.size(1) <= 1 || kv.stride(1) < (int64_t{1} << 31), op,
            ": kv's positions must be less than 2^31 elements apart, got a stride of ", kv.stride(1));
  check_slots(op, indices);
  check_same_device(op, "kv", kv, "q", q);
  check_same_device(op, "indices", indices, "q", q);
  for (const auto& [name, row] : rows) {
    if (row) check_same_device(op, name, *row, "q", q);
  }
  if (options.attn_sink) check_same_device(op, "attn_sink", *options.attn_sink, "q", q);
}

Problem problem_of(const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options,
                   const DeviceCall& call) {
  const auto& [sm_scale, d_v, causal, q_start, positions_per_key, topk_length, starts, ends, attn_sink] = options;
  const int64_t *q_sizes = q.sizes().data(), *q_strides = q.strides().data();
  const int64_t *kv_sizes = kv.sizes().data(), *kv_strides = kv.strides().data();
  const int64_t* indices_strides = indices.strides().data();
  const int64_t d_qk = q_sizes[3];
  const listed_keys::Problem problem{
      .q = q.data_ptr(),
      .kv = kv.data_ptr(),
      .indices = static_cast<const int*>(indices.data_ptr()),
      .topk_length = topk_length ? static_cast<const int*>(topk_length->data_ptr()) : nullptr,
      .starts = starts ? static_cast<const int*>(starts->data_ptr()) : nullptr,
      .ends = ends ? static_cast<const int*>(ends->data_ptr()) : nullptr,
      .q_stride_b = row_stride(q_sizes, q_strides, 0),
      .q_stride_s = row_stride(q_sizes, q_strides, 1),
      .q_stride_h = row_stride(q_sizes, q_strides, 2),
      .kv_stride_b = row_stride(kv_sizes, kv_strides, 0),
      .kv_stride_s = row_stride(kv_sizes, kv_strides, 1),
      .kv_stride_g = row_stride(kv_sizes, kv_strides, 2),
      .indices_stride_b = indices_strides[0],
      .indices_stride_s = indices_strides[1],
      .indices_stride_g = indices_strides[2],
      .topk_length_stride_b = topk_length ? topk_length->stride(0) : 0,
      .topk_length_stride_s = topk_length ? topk_length->stride(1) : 0,
      .starts_stride_b = starts ? starts->stride(0) : 0,
      .starts_stride_s = starts ? starts->stride(1) : 0,
      .ends_stride_b = ends ? ends->stride(0) : 0,
      .ends_stride_s = ends ? ends->stride(1) : 0,
      .batch = static_cast<int>(q_sizes[0]),
      .seq_q = static_cast<int>(q_sizes[1]),
      .seq_kv = static_cast<int>(kv_sizes[1]),
      .heads = static_cast<int>(q_sizes[2]),
      .groups = static_cast<int>(kv_sizes[2]),
      .topk = static_cast<int>(indices.size(3)),
      .d_qk = static_cast<int>(d_qk),
      .device = call.index,
      .num_sms = call.num_sms,
      .causal = causal,
      .q_start = q_start,
      .positions_per_key = positions_per_key,
      .sm_scale = static_cast<float>(sm_scale ? *sm_scale : 1.0 / std::sqrt(static_cast<double>(d_qk))),
  };
  return {
      problem,
      attn_sink ? static_cast<const float*>(attn_sink->data_ptr()) : nullptr,
      attn_sink ? attn_sink->stride(0) : 0,
      static_cast<int>(d_v.value_or(kValueColumns)),
  };
}

}  // namespace dsa::sparse_mla
