// dsa::indexer_scores_bwd and dsa::indexer_logits_bwd on CUDA: argument checks, allocation, launch. Math:
// docs/indexer/indexer_scores.md and docs/indexer/indexer_logits.md.
#include <cstdint>
#include <tuple>

#include "ops/indexer/indexer_bwd/config.h"
#include "ops/indexer/indexer_bwd/params.h"
#include "ops/indexer/inputs.h"
#include "ops/shared/key_sums/buffers.h"
#include "torch/abi.h"

namespace dsa::indexer_bwd {
namespace {

// Limits in bytes: entries of one launch; dk's rows in a deterministic call.
constexpr int64_t kEntryBytes = 256 << 20, kRowBytes = 1 << 30;
// Bytes of fp32 sums above which all groups start at the same tile: they then sweep through the keys together, and the
// sums in use stay in L2.
constexpr int64_t kKeepInStep = 32 << 20;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// All parameters except those that say which keys a query sees.
Params params_of(const Tensor& gradients, const Tensor& q, const Tensor& k, const Tensor& weights,
                 const DeviceCall& call) {
  Params p{};
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.dscores = static_cast<const float*>(gradients.data_ptr());
  p.q_stride_s = q.stride(0);
  p.q_stride_h = q.stride(1);
  p.k_stride = k.stride(0);
  p.weights_stride_s = weights.stride(0);
  p.weights_stride_h = weights.stride(1);
  p.dscores_stride = gradients.stride(0);
  p.seq = static_cast<int>(q.size(0));
  p.seq_kv = static_cast<int>(k.size(0));
  p.heads = static_cast<int>(q.size(1));
  p.dim = static_cast<int>(q.size(2));
  p.slots = static_cast<int>(gradients.size(1));
  p.device = call.index;
  p.num_sms = call.num_sms;
  return p;
}

// `entries` is the maximum number of entries per group.
Gradients gradients_of(const DeviceCall& call, Params& p, int64_t entries, bool deterministic) {
  DSA_CHECK(entries < int64_t{1} << 30, call.op, ": a group of ", queries_of_group(p.heads),
            " queries must list fewer than 2^30 keys, got ", entries);
  const int64_t group_queries = queries_of_group(p.heads), groups = (p.seq + group_queries - 1) / group_queries;
  const int64_t capacity = (entries + kTileKeys - 1) / kTileKeys * kTileKeys;
  const int64_t entry_bytes = deterministic ? p.dim * 2 : sizeof(int) + 2 * group_queries;
  const int64_t at_once =
      groups_at_once(groups, capacity * entry_bytes, deterministic ? kRowBytes : kEntryBytes, p.num_sms);
  p.capacity = static_cast<int>(capacity);
  p.groups_at_once = static_cast<int>(at_once);
  p.deterministic = deterministic;

  Tensor dq = empty({p.seq, p.heads, p.dim}, ScalarType::BFloat16, p.device);
  Tensor dweights = empty({p.seq, p.heads}, ScalarType::Float, p.device);
  Tensor lists = empty({at_once * capacity}, ScalarType::Int, p.device);
  Tensor gradients = empty({at_once * capacity * group_queries}, ScalarType::BFloat16, p.device);
  Tensor counts = empty({2 * at_once}, ScalarType::Int, p.device);
  p.dq = dq.data_ptr();
  p.dweights = static_cast<float*>(dweights.data_ptr());
  p.entries = static_cast<int*>(lists.data_ptr());
  p.gradients = gradients.data_ptr();
  p.counts = static_cast<int*>(counts.data_ptr());
  p.listing = reinterpret_cast<unsigned*>(p.counts + at_once);
  p.dk.keys = p.seq_kv;
  p.dk.columns = p.dim;
  p.dk.device = p.device;
  p.dk.blocks = 1;
  const int64_t slots = deterministic ? at_once * capacity : 0;
  const auto dk = key_sums::allocate(p.dk, {p.seq_kv, p.dim}, !deterministic || at_once < groups, slots, slots);
  p.spread = int64_t{p.seq_kv} * p.dim * int64_t{sizeof(float)} <= kKeepInStep;

  call.check(launch(p, call.stream()));
  return {dq, dk.front(), dweights};
}

// Gradients arrive in any layout, often expanded from one element.
Tensor with_dense_rows(const Tensor& gradients) {
  return gradients.size(1) > 1 && gradients.stride(1) != 1 ? aligned_contiguous(gradients) : gradients;
}

Gradients indexer_scores_bwd(Tensor dscores, Tensor q, Tensor k, Tensor weights, Tensor indices, bool deterministic) {
  constexpr char kOp[] = "dsa::indexer_scores_bwd";
  indexer::check_listed(kOp, q, k, weights, indices);
  check_tensor(kOp, "dscores", dscores, ScalarType::Float, {{"S", q.size(0)}, {"K", indices.size(1)}});
  check_same_device(kOp, "dscores", dscores, "q", q);
  const DeviceCall call(kOp, "q", q);
  dscores = with_dense_rows(dscores);
  Params params = params_of(dscores, q, k, weights, call);
  params.indices = static_cast<const int*>(indices.data_ptr());
  params.indices_stride = indices.stride(0);
  return gradients_of(call, params, queries_of_group(params.heads) * indices.size(1), deterministic);
}

Gradients indexer_logits_bwd(Tensor dlogits, Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends,
                             bool deterministic) {
  constexpr char kOp[] = "dsa::indexer_logits_bwd";
  indexer::check_rows(kOp, q, k, weights);
  const int64_t seq = q.size(0);
  check_tensor(kOp, "starts", starts, ScalarType::Int, {{"S", seq}});
  check_tensor(kOp, "ends", ends, ScalarType::Int, {{"S", seq}});
  check_same_device(kOp, "starts", starts, "q", q);
  check_same_device(kOp, "ends", ends, "q", q);
  check_tensor(kOp, "dlogits", dlogits, ScalarType::Float, {{"S", seq}, {"S_kv", k.size(0)}});
  check_same_device(kOp, "dlogits", dlogits, "q", q);
  const DeviceCall call(kOp, "q", q);
  dlogits = with_dense_rows(dlogits);
  Params params = params_of(dlogits, q, k, weights, call);
  params.starts = static_cast<const int*>(starts.data_ptr());
  params.ends = static_cast<const int*>(ends.data_ptr());
  params.starts_stride = starts.stride(0);
  params.ends_stride = ends.stride(0);
  return gradients_of(call, params, k.size(0), deterministic);
}

}  // namespace
}  // namespace dsa::indexer_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("indexer_scores_bwd", TORCH_BOX(&dsa::indexer_bwd::indexer_scores_bwd));
  m.impl("indexer_logits_bwd", TORCH_BOX(&dsa::indexer_bwd::indexer_logits_bwd));
}
