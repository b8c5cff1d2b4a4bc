// dsa::indexer_scores on CUDA: argument checks, allocation, launch. Math: docs/indexer/indexer_scores.md.
#include <cstdint>

#include "ops/indexer/indexer_scores/params.h"
#include "ops/indexer/inputs.h"
#include "torch/abi.h"

namespace dsa::indexer_scores {
namespace {

constexpr char kOp[] = "dsa::indexer_scores";

Tensor indexer_scores(Tensor q, Tensor k, Tensor weights, Tensor indices, bool /*deterministic: the backward*/) {
  indexer::check_listed(kOp, q, k, weights, indices);
  const int64_t seq = q.size(0), heads = q.size(1), dim = q.size(2);
  const DeviceCall call(kOp, "q", q);

  const int64_t topk = indices.size(1);
  Tensor scores = empty({seq, topk}, ScalarType::Float, call.index);
  if (scores.numel() == 0) return scores;
  const auto row_stride = [](const Tensor& tensor, int64_t dense) {
    return tensor.size(0) > 1 ? tensor.stride(0) : dense;  // a single row may have any stride
  };
  listed_keys::Params params{};
  params.q = q.data_ptr();
  params.kv = k.data_ptr();
  params.indices = static_cast<const int*>(indices.data_ptr());
  params.q_stride_s = row_stride(q, heads * dim);
  params.q_stride_h = q.stride(1);
  params.kv_stride_s = row_stride(k, dim);
  params.indices_stride_s = indices.stride(0);
  params.batch = params.groups = 1;
  params.seq_q = static_cast<int>(seq);
  params.seq_kv = static_cast<int>(k.size(0));
  params.heads = static_cast<int>(heads);
  params.topk = static_cast<int>(topk);
  params.d_qk = static_cast<int>(dim);
  params.device = call.index;
  params.num_sms = call.num_sms;
  params.causal = false;
  params.head_factors = static_cast<const float*>(weights.data_ptr());
  params.head_factors_stride_s = weights.stride(0);
  params.head_factors_stride_h = weights.stride(1);
  params.sums = static_cast<float*>(scores.data_ptr());
  call.check(launch(params, call.stream()));
  return scores;
}

}  // namespace
}  // namespace dsa::indexer_scores

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_scores", TORCH_BOX(&dsa::indexer_scores::indexer_scores)); }
