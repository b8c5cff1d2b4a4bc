#include "ops/sparse_mla/sparse_mha/inputs.h"

#include <cmath>

namespace dsa::sparse_mha {
namespace {

constexpr int64_t kMaxStart = int64_t{1} << 62;      // so that no query's position overflows
constexpr int64_t kMaxPositions = int64_t{1} << 24;  // so that 64 rows of sums are counted in 32 bits

}  // namespace

void check_inputs(const char* op, const Inputs& inputs) {
  const auto& [q, k, k_rope, indices, v, sm_scale, causal, q_start, starts, ends, window] = inputs;
  check_tensor(op, "q", q, ScalarType::BFloat16, {{"B"}, {"S"}, {"H"}, {"Dqk", kColumns}});
  const Dim batch{"B", q.size(0)}, seq{"S", q.size(1)}, heads{"H", q.size(2)};
  check_tensor(op, "k", k, ScalarType::BFloat16, {batch, {"S_kv"}, heads, {"Dnope", kNope}});
  const Dim keys{"S_kv", k.size(1)};
  check_tensor(op, "k_rope", k_rope, ScalarType::BFloat16, {batch, keys, {"Drope", kRope}});
  check_tensor(op, "indices", indices, ScalarType::Int, {batch, seq, {"K"}});
  if (starts) check_tensor(op, "starts", *starts, ScalarType::Int, {batch, seq});
  if (ends) check_tensor(op, "ends", *ends, ScalarType::Int, {batch, seq});
  DSA_CHECK(indices.size(2) >= 1, op, ": indices must have at least one slot per row, got ", describe(indices));
  check_scale(op, sm_scale);
  DSA_CHECK(q_start >= 0 && q_start <= kMaxStart, op, ": q_start must be from 0 to 2^62, got ", q_start);
  DSA_CHECK(starts.has_value() == ends.has_value(), op, ": starts and ends must be given together");
  DSA_CHECK(!starts || q_start == 0, op, ": q_start must be 0 with starts and ends, got ", q_start);
  DSA_CHECK(!window || (causal && !starts), op,
            ": window must be None with causal=False, or with starts and ends, got ", *window);
  DSA_CHECK(!window || (*window >= 1 && *window <= kMaxStart), op, ": window must be from 1 to 2^62, got ", *window);
  if (v) check_tensor(op, "v", *v, ScalarType::BFloat16, {batch, keys, heads, {"Dv", kValueColumns}});
  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "k", k);
  check_rows_aligned(op, "k_rope", k_rope);
  if (v) check_rows_aligned(op, "v", *v);
  DSA_CHECK(q.size(1) <= kMaxPositions, op, ": q must have at most 2^24 positions, got ", describe(q));
  DSA_CHECK(k.size(1) <= kMaxPositions, op, ": k must have at most 2^24 positions, got ", describe(k));
  check_slots(op, indices);
  check_same_device(op, "k", k, "q", q);
  check_same_device(op, "k_rope", k_rope, "q", q);
  check_same_device(op, "indices", indices, "q", q);
  if (starts) check_same_device(op, "starts", *starts, "q", q);
  if (ends) check_same_device(op, "ends", *ends, "q", q);
  if (v) check_same_device(op, "v", *v, "q", q);
}

Heads heads_of(const Tensor& tensor) {
  // The stride of a dimension of size 1 is never used, and may be anything.
  const auto stride = [&](int dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : int64_t{kColumns}; };
  return {tensor.data_ptr(), stride(0), stride(1), tensor.dim() == 4 ? stride(2) : int64_t{kColumns}};
}

MaskedProblem::MaskedProblem(const Inputs& inputs, const DeviceCall& call, Bits bits) {
  const auto& [q, k, k_rope, indices, v, sm_scale, causal, q_start, starts, ends, window] = inputs;
  const int64_t batch = q.size(0), q_blocks = (q.size(1) + kBlock - 1) / kBlock;
  const int64_t kv_blocks = (k.size(1) + kBlock - 1) / kBlock, tile_words = (kv_blocks + 31) / 32;
  constexpr int64_t kWords = kBlock / 32;
  keys_ =
      dsa::empty({batch, q_blocks * kBlock, bits == Bits::kKeys ? kv_blocks * kWords : 0}, ScalarType::Int, call.index);
  queries_ = dsa::empty({batch, kv_blocks * kBlock, bits == Bits::kQueries ? q_blocks * kWords : 0}, ScalarType::Int,
                        call.index);
  tiles_ = dsa::empty({batch, q_blocks, tile_words}, ScalarType::Int, call.index);
  const auto words = [](Tensor& tensor) {
    return tensor.numel() > 0 ? static_cast<uint32_t*>(tensor.data_ptr()) : nullptr;
  };
  problem = {
      .q = heads_of(q),
      .k = heads_of(k),
      .k_rope = heads_of(k_rope),
      .v = v ? heads_of(*v) : Heads{},
      .mask = {.keys = words(keys_),
               .queries = words(queries_),
               .tiles = words(tiles_),
               .q_blocks = static_cast<int>(q_blocks),
               .kv_blocks = static_cast<int>(kv_blocks),
               .tile_words = static_cast<int>(tile_words)},
      .batch = static_cast<int>(batch),
      .heads = static_cast<int>(q.size(2)),
      .seq_q = static_cast<int>(q.size(1)),
      .seq_kv = static_cast<int>(k.size(1)),
      .device = call.index,
      .num_sms = call.num_sms,
      .sm_scale = static_cast<float>(sm_scale ? *sm_scale : 1.0 / std::sqrt(static_cast<double>(kColumns))),
  };
  const auto row_ids = [](const std::optional<Tensor>& rows) {
    return rows ? static_cast<const int*>(rows->data_ptr()) : nullptr;
  };
  lists = {
      .ids = static_cast<const int*>(indices.data_ptr()),
      .starts = row_ids(starts),
      .ends = row_ids(ends),
      .ids_stride_b = indices.stride(0),
      .ids_stride_s = indices.stride(1),
      .starts_stride_b = starts ? starts->stride(0) : 0,
      .starts_stride_s = starts ? starts->stride(1) : 0,
      .ends_stride_b = ends ? ends->stride(0) : 0,
      .ends_stride_s = ends ? ends->stride(1) : 0,
      .batch = problem.batch,
      .seq_q = problem.seq_q,
      .seq_kv = problem.seq_kv,
      .topk = static_cast<int>(indices.size(2)),
      .q_start = q_start,
      .window = window.value_or(kNoWindow),
      .causal = causal,
  };
  call.check(launch_mask(problem.mask, lists, call.index, call.stream()));
}

}  // namespace dsa::sparse_mha
