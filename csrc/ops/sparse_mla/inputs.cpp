#include "ops/sparse_mla/inputs.h"

#include <cmath>

namespace dsa::sparse_mla {
namespace {

constexpr int64_t kMaxHeadsPerGroup = 128;
constexpr int64_t kValueColumns = 512;

}  // namespace

void check_inputs(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options) {
  check_tensor(op, "q", q, ScalarType::BFloat16, {{"B"}, {"S"}, {"H"}, {"Dqk"}});
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  check_tensor(op, "kv", kv, ScalarType::BFloat16, {{"B", batch}, {"S_kv"}, {"G"}, {"Dqk", d_qk}});
  const int64_t groups = kv.size(2);
  check_tensor(op, "indices", indices, ScalarType::Int, {{"B", batch}, {"S", seq_q}, {"G", groups}, {"K"}});
  if (options.topk_length) {
    check_tensor(op, "topk_length", *options.topk_length, ScalarType::Int, {{"B", batch}, {"S", seq_q}});
  }
  if (options.attn_sink) check_tensor(op, "attn_sink", *options.attn_sink, ScalarType::Float, {{"H", heads}});

  DSA_CHECK((d_qk == 576 || d_qk == 512) && options.d_v == kValueColumns, op,
            ": (Dqk, d_v) must be (576, 512) or (512, 512), got (", d_qk, ", ", options.d_v, ")");
  DSA_CHECK(groups >= 1 && heads % groups == 0 && heads / groups <= kMaxHeadsPerGroup, op,
            ": q's heads must be a multiple of kv's groups, at most 128 a group, got ", heads, " heads and ", groups,
            " groups");
  DSA_CHECK(indices.size(3) >= 1, op, ": indices must have at least one slot a row, got ", describe(indices));
  if (options.sm_scale) {
    DSA_CHECK(std::isfinite(static_cast<float>(*options.sm_scale)), op, ": sm_scale must be finite in fp32, got ",
              *options.sm_scale);
  }
  DSA_CHECK(options.q_start >= 0, op, ": q_start must be at least 0, got ", options.q_start);
  DSA_CHECK(options.kv_stride >= 1, op, ": kv_stride must be at least 1, got ", options.kv_stride);

  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "kv", kv);
  DSA_CHECK(kv.size(1) <= 1 || kv.stride(1) < (int64_t{1} << 31), op,
            ": kv's positions must be less than 2^31 elements apart, got a stride of ", kv.stride(1));
  check_last_stride(op, "indices", indices);
  check_same_device(op, "kv", kv, "q", q);
  check_same_device(op, "indices", indices, "q", q);
  if (options.topk_length) check_same_device(op, "topk_length", *options.topk_length, "q", q);
  if (options.attn_sink) check_same_device(op, "attn_sink", *options.attn_sink, "q", q);
}

Device hopper_device(const char* op, const Tensor& q) {
  DSA_CHECK(q.is_cuda(), op, ": q must be on a CUDA device, got ", describe_device(q));
  const Device device = device_info(q.get_device_index());
  DSA_CHECK(device.capability == 90, op, ": needs a Hopper GPU (sm_90), got sm_", device.capability, " on ",
            describe_device(q));
  return device;
}

int64_t row_stride(const Tensor& tensor, int64_t dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : tensor.size(3);
}

float score_scale(const Options& options, int64_t d_qk) {
  return static_cast<float>(options.sm_scale ? *options.sm_scale : 1.0 / std::sqrt(static_cast<double>(d_qk)));
}

}  // namespace dsa::sparse_mla
