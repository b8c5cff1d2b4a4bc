// dsa::block_sparse_attn_fwd on CUDA: argument checks, allocation, launch. Math:
// docs/block_sparse/block_sparse_attn.md.
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/block_sparse/block_sparse_attn_fwd/params.h"
#include "ops/block_sparse/inputs.h"
#include "torch/abi.h"

namespace dsa::block_sparse_attn_fwd {
namespace {

using namespace dsa::block_sparse;

constexpr char kOp[] = "dsa::block_sparse_attn_fwd";

std::tuple<Tensor, Tensor> block_sparse_attn_fwd(Tensor q, Tensor k, Tensor v, Tensor q2k_index, Tensor q2k_num,
                                                 std::optional<Tensor> kv_block_size, std::optional<double> sm_scale) {
  const Inputs inputs{q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale};
  check_inputs(kOp, inputs);
  const DeviceCall call(kOp, "q", q);

  Tensor out = empty_rows_like(q, call.index);
  Tensor lse = empty({q.size(0), q.size(1), q.size(2)}, ScalarType::Float, call.index);
  if (lse.numel() == 0) return {out, lse};
  if (k.size(2) == 0) return {zero_(out), fill_(lse, -INFINITY)};

  Params params{problem_of(inputs, call)};
  const int items = params.batch * params.heads * params.q_blocks;
  params.plan = plan_work(items, params.slots, call.num_sms);
  std::optional<Tensor> partial_out, partial_lse;
  if (has_parts(params.plan)) {
    const int64_t slots = int64_t{2} * params.plan.teams;
    partial_out = empty({slots, kBlock, params.columns}, ScalarType::Float, call.index);
    partial_lse = empty({slots, kBlock}, ScalarType::Float, call.index);
    params.partial_out = static_cast<float*>(partial_out->data_ptr());
    params.partial_lse = static_cast<float*>(partial_lse->data_ptr());
  }
  params.out = heads_of(out);
  params.lse = static_cast<float*>(lse.data_ptr());
  call.check(launch(params, call.stream()));
  return {out, lse};
}

}  // namespace
}  // namespace dsa::block_sparse_attn_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("block_sparse_attn_fwd", TORCH_BOX(&dsa::block_sparse_attn_fwd::block_sparse_attn_fwd));
}
