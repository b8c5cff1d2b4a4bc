#include "ops/indexer/inputs.h"

#include <algorithm>

namespace dsa::indexer {

void check_heads(const char* op, int64_t heads, int64_t dim) {
  DSA_CHECK(heads == 8 || heads == 16 || heads == 32 || heads == 64, op, ": q's heads must be 8, 16, 32 or 64, got ",
            heads);
  DSA_CHECK(dim == 64 || dim == 128, op, ": q's head dimension must be 64 or 128, got ", dim);
}

void check_inputs(const char* op, Scoring& scoring) {
  const auto& [q, k, weights, starts, ends, k_scale] = scoring;
  check_tensor(op, "q", q, {ScalarType::Float8_e4m3fn, ScalarType::BFloat16}, {{"S"}, {"Hi"}, {"Di"}});
  const int64_t seq = q.size(0), heads = q.size(1), dim = q.size(2);
  const bool is_fp8 = q.scalar_type() == ScalarType::Float8_e4m3fn;
  check_tensor(op, "k", k, q.scalar_type(), {{"S_kv"}, {"Di", dim}});
  check_tensor(op, "weights", weights, ScalarType::Float, {{"S", seq}, {"Hi", heads}});
  check_tensor(op, "starts", starts, ScalarType::Int, {{"S", seq}});
  check_tensor(op, "ends", ends, ScalarType::Int, {{"S", seq}});
  if (is_fp8) {
    DSA_CHECK(k_scale.has_value(), op, ": k_scale (float32 [S_kv]) is required when q is float8_e4m3fn, got None");
    check_tensor(op, "k_scale", *k_scale, ScalarType::Float, {{"S_kv", k.size(0)}});
  } else {
    DSA_CHECK(!k_scale, op, ": k_scale must be None when q is bfloat16, got ", describe(*k_scale));
  }
  check_heads(op, heads, dim);
  check_positions(op, "q", q, 0);
  check_positions(op, "k", k, 0);

  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "k", k);
  check_rows_aligned(op, "weights", weights);
  check_same_device(op, "k", k, "q", q);
  check_same_device(op, "weights", weights, "q", q);
  check_same_device(op, "starts", starts, "q", q);
  check_same_device(op, "ends", ends, "q", q);
  if (k_scale) {
    check_same_device(op, "k_scale", *k_scale, "q", q);
    scoring.k_scale = contiguous(*k_scale);
  }
}

void check_rows(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights) {
  check_tensor(op, "q", q, ScalarType::BFloat16, {{"S"}, {"Hi"}, {"Di"}});
  const int64_t seq = q.size(0), heads = q.size(1), dim = q.size(2);
  check_tensor(op, "k", k, ScalarType::BFloat16, {{"S_kv"}, {"Di", dim}});
  check_tensor(op, "weights", weights, ScalarType::Float, {{"S", seq}, {"Hi", heads}});
  check_heads(op, heads, dim);
  check_positions(op, "q", q, 0);
  check_positions(op, "k", k, 0);
  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "k", k);
  DSA_CHECK(k.size(0) <= 1 || k.stride(0) < (int64_t{1} << 31), op,
            ": k's rows must be less than 2^31 elements apart, got a stride of ", k.stride(0));
  check_same_device(op, "k", k, "q", q);
  check_same_device(op, "weights", weights, "q", q);
}

void check_listed(const char* op, const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices) {
  check_rows(op, q, k, weights);
  check_tensor(op, "indices", indices, ScalarType::Int, {{"S", q.size(0)}, {"K"}});
  check_slots(op, indices);
  check_same_device(op, "indices", indices, "q", q);
}

indexer_logits::Params params_of(const Scoring& scoring, int64_t first, int64_t count, const Tensor& logits,
                                 const DeviceCall& call) {
  const auto& [q, k, weights, starts, ends, k_scale] = scoring;
  const auto at = [&](const Tensor& tensor) {
    return static_cast<const char*>(tensor.data_ptr()) +
           first * tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
  };
  return {
      .q = at(q),
      .k = k.data_ptr(),
      .weights = reinterpret_cast<const float*>(at(weights)),
      .starts = reinterpret_cast<const int*>(at(starts)),
      .ends = reinterpret_cast<const int*>(at(ends)),
      .k_scale = k_scale ? static_cast<const float*>(k_scale->data_ptr()) : nullptr,
      .logits = static_cast<float*>(logits.data_ptr()),
      .q_stride_s = q.stride(0),
      .q_stride_h = q.stride(1),
      .k_stride = k.stride(0),
      .weights_stride = weights.stride(0),
      .starts_stride = starts.stride(0),
      .ends_stride = ends.stride(0),
      .logits_stride = logits.stride(0),
      .seq = static_cast<int>(count),
      .seq_kv = static_cast<int>(k.size(0)),
      .heads = static_cast<int>(q.size(1)),
      .dim = static_cast<int>(q.size(2)),
      .any_left = nullptr,
      .clean = true,
      .is_bf16 = q.scalar_type() == ScalarType::BFloat16,
      .device = call.index,
      .num_sms = call.num_sms,
  };
}

}  // namespace dsa::indexer
