#include "ops/block_sparse/inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace dsa::block_sparse {
namespace {

// So that kernels may count slots, times the parts into which lists are split, in 32 bits.
constexpr int64_t kMaxSlots = int64_t{1} << 20, kMaxSlotsOfKeys = int64_t{1} << 30;

int64_t blocks(int64_t positions) { return (positions + kBlock - 1) / kBlock; }

}  // namespace

void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale) {
  check_tensor(op, "q", q, ScalarType::BFloat16, {{"B"}, {"H"}, {"Nq"}, {"D"}});
  const int64_t batch = q.size(0), heads = q.size(1), columns = q.size(3);
  check_tensor(op, "k", k, ScalarType::BFloat16, {{"B", batch}, {"Hkv"}, {"Nkv"}, {"D", columns}});
  const int64_t kv_heads = k.size(1), seq_kv = k.size(2);
  check_tensor(op, "v", v, ScalarType::BFloat16, {{"B", batch}, {"Hkv", kv_heads}, {"Nkv", seq_kv}, {"D", columns}});
  DSA_CHECK(columns == 64 || columns == 128, op, ": q's head dimension must be 64 or 128, got ", columns);
  DSA_CHECK(kv_heads >= 1 && heads % kv_heads == 0, op, ": q's heads must be a multiple of k's, got ", heads, " and ",
            kv_heads);
  check_scale(op, sm_scale);
  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "k", k);
  check_rows_aligned(op, "v", v);
  check_same_device(op, "k", k, "q", q);
  check_same_device(op, "v", v, "q", q);
}

void check_inputs(const char* op, const Inputs& inputs) {
  const auto& [q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale] = inputs;
  check_heads(op, q, k, v, sm_scale);
  const int64_t batch = q.size(0), heads = q.size(1), q_blocks = blocks(q.size(2));
  check_tensor(op, "q2k_index", q2k_index, ScalarType::Int, {{"B", batch}, {"H", heads}, {"Mq", q_blocks}, {"M"}});
  check_tensor(op, "q2k_num", q2k_num, ScalarType::Int, {{"B", batch}, {"H", heads}, {"Mq", q_blocks}});
  if (kv_block_size) check_tensor(op, "kv_block_size", *kv_block_size, ScalarType::Int, {{"Mkv", blocks(k.size(2))}});
  DSA_CHECK(q2k_index.size(3) >= 1, op, ": q2k_index must have at least one slot per row, got ", describe(q2k_index));
  const int64_t rows_of_keys = q_blocks * (heads / k.size(1));
  DSA_CHECK(q2k_index.size(3) <= kMaxSlots && rows_of_keys <= kMaxSlotsOfKeys / q2k_index.size(3), op,
            ": q2k_index must have at most 2^20 slots per row and 2^30 per head of k, got ", describe(q2k_index));
  check_last_stride(op, "q2k_index", q2k_index);
  check_same_device(op, "q2k_index", q2k_index, "q", q);
  check_same_device(op, "q2k_num", q2k_num, "q", q);
  if (kv_block_size) check_same_device(op, "kv_block_size", *kv_block_size, "q", q);
}

Heads heads_of(const Tensor& tensor) {
  const int64_t *sizes = tensor.sizes().data(), *strides = tensor.strides().data();
  return {tensor.data_ptr(), row_stride(sizes, strides, 0), row_stride(sizes, strides, 1),
          row_stride(sizes, strides, 2)};
}

Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> sm_scale,
                   const DeviceCall& call) {
  const int64_t columns = q.size(3);
  const double scale = sm_scale ? *sm_scale : 1.0 / std::sqrt(static_cast<double>(columns));
  constexpr double kLog2E = 1.4426950408889634;
  return {
      .q = heads_of(q),
      .k = heads_of(k),
      .v = heads_of(v),
      .batch = static_cast<int>(q.size(0)),
      .heads = static_cast<int>(q.size(1)),
      .kv_heads = static_cast<int>(k.size(1)),
      .seq_q = static_cast<int>(q.size(2)),
      .seq_kv = static_cast<int>(k.size(2)),
      .columns = static_cast<int>(columns),
      .q_blocks = static_cast<int>(blocks(q.size(2))),
      .kv_blocks = static_cast<int>(blocks(k.size(2))),
      .device = call.index,
      .num_sms = call.num_sms,
      .sm_scale = static_cast<float>(scale),
      .scale_log2 = std::max(static_cast<float>(std::abs(scale) * kLog2E), std::numeric_limits<float>::denorm_min()),
  };
}

Problem problem_of(const Inputs& inputs, const DeviceCall& call) {
  const auto& [q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale] = inputs;
  Problem problem = problem_of(q, k, v, sm_scale, call);
  problem.index = static_cast<const int*>(q2k_index.data_ptr());
  problem.num = static_cast<const int*>(q2k_num.data_ptr());
  problem.index_stride_b = q2k_index.stride(0);
  problem.index_stride_h = q2k_index.stride(1);
  problem.index_stride_m = q2k_index.stride(2);
  problem.num_stride_b = q2k_num.stride(0);
  problem.num_stride_h = q2k_num.stride(1);
  problem.num_stride_m = q2k_num.stride(2);
  problem.slots = static_cast<int>(q2k_index.size(3));
  if (kv_block_size) {
    problem.sizes = static_cast<const int*>(kv_block_size->data_ptr());
    problem.sizes_stride = kv_block_size->stride(0);
  }
  return problem;
}

Tensor with_aligned_rows(const Tensor& tensor) {
  bool fits = tensor.stride(3) == 1 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    fits &= tensor.size(dim) <= 1 || (tensor.stride(dim) > 0 && tensor.stride(dim) % 8 == 0);
  }
  return fits ? tensor : aligned_contiguous(tensor);
}

}  // namespace dsa::block_sparse
