// dsa::attn_dist on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/attn_dist.md.
#include <cstdint>
#include <optional>

#include "ops/shared/listed_keys/config.h"
#include "ops/sparse_mla/attn_dist/call.h"
#include "ops/sparse_mla/inputs.h"
#include "torch/abi.h"

namespace dsa::attn_dist {
namespace {

using namespace dsa::sparse_mla;
using listed_keys::kBlockHeads;

constexpr char kOp[] = "dsa::attn_dist";

Tensor attn_dist(Tensor q, Tensor kv, Tensor indices, Tensor lse, std::optional<double> sm_scale, bool causal,
                 int64_t q_start, int64_t positions_per_key, std::optional<Tensor> topk_length,
                 std::optional<Tensor> starts, std::optional<Tensor> ends, bool normalize, bool per_head_block) {
  const Options options{sm_scale,    std::nullopt, causal, q_start,     positions_per_key,
                        topk_length, starts,       ends,   std::nullopt};
  check_inputs(kOp, q, kv, indices, options);
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2);
  const int64_t groups = kv.size(2), topk = indices.size(3);
  check_tensor(kOp, "lse", lse, ScalarType::Float, {{"B", batch}, {"S", seq_q}, {"H", heads}});
  check_same_device(kOp, "lse", lse, "q", q);
  DSA_CHECK(!(normalize && per_head_block), kOp,
            ": normalize must be False when per_head_block is True: rows are divided by the sum over all blocks");
  const DeviceCall call(kOp, "q", q);

  Tensor dist = per_head_block ? empty({(heads / groups + kBlockHeads - 1) / kBlockHeads, batch, seq_q, groups, topk},
                                       ScalarType::Float, call.index)
                               : empty({batch, seq_q, groups, topk}, ScalarType::Float, call.index);
  if (dist.numel() == 0) return dist;
  if (heads == 0) return zero_(dist);
  listed_keys::Params params{
      problem_of(q, kv, indices, options, call),
      static_cast<const float*>(lse.data_ptr()),
      lse.stride(0),
      lse.stride(1),
      lse.stride(2),
      static_cast<float*>(dist.data_ptr()),
      normalize,
      per_head_block,
  };
  compute(params, call);
  return dist;
}

}  // namespace
}  // namespace dsa::attn_dist

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("attn_dist", TORCH_BOX(&dsa::attn_dist::attn_dist)); }
