// dsa::block_sparse_attn_bwd on CUDA: argument checks, allocation, launch. Math:
// docs/block_sparse/block_sparse_attn.md.
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/block_sparse/block_sparse_attn_bwd/params.h"
#include "ops/block_sparse/inputs.h"
#include "torch/abi.h"

namespace dsa::block_sparse_attn_bwd {
namespace {

using namespace dsa::block_sparse;

constexpr char kOp[] = "dsa::block_sparse_attn_bwd";

std::tuple<Tensor, Tensor, Tensor> block_sparse_attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                                                         Tensor lse, Tensor q2k_index, Tensor q2k_num,
                                                         std::optional<Tensor> kv_block_size,
                                                         std::optional<double> sm_scale, std::optional<Tensor> dlse) {
  const Inputs inputs{q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale};
  check_inputs(kOp, inputs);
  const Dim batch{"B", q.size(0)}, heads{"H", q.size(1)}, queries{"Nq", q.size(2)}, columns{"D", q.size(3)};
  check_tensor(kOp, "dout", dout, ScalarType::BFloat16, {batch, heads, queries, columns});
  check_tensor(kOp, "out", out, ScalarType::BFloat16, {batch, heads, queries, columns});
  check_tensor(kOp, "lse", lse, ScalarType::Float, {batch, heads, queries});
  if (dlse) check_tensor(kOp, "dlse", *dlse, ScalarType::Float, {batch, heads, queries});
  check_same_device(kOp, "dout", dout, "q", q);
  check_same_device(kOp, "out", out, "q", q);
  check_same_device(kOp, "lse", lse, "q", q);
  if (dlse) check_same_device(kOp, "dlse", *dlse, "q", q);
  const DeviceCall call(kOp, "q", q);

  Tensor dq = empty_rows_like(q, call.index);
  Tensor dk = empty_rows_like(k, call.index);
  Tensor dv = empty_rows_like(v, call.index);
  if (q.numel() == 0 || k.numel() == 0) {
    return {zero_(dq), zero_(dk), zero_(dv)};
  }
  dout = with_aligned_rows(dout);
  out = with_aligned_rows(out);
  lse = aligned_contiguous(lse);
  if (dlse) dlse = aligned_contiguous(*dlse);

  Params params{problem_of(inputs, call)};
  const int64_t lists = q.size(0) * q.size(1);
  const int kv_heads = params.batch * params.kv_heads, group = params.heads / params.kv_heads;
  params.plan = plan_work(kv_heads, params.kv_blocks, group * params.q_blocks, params.slots, call.num_sms);
  const Units units(params.plan, params.slots);
  params.max_units = units.count();
  Tensor rows = empty({lists, params.q_blocks, 2, kBlock}, ScalarType::Float, call.index);
  Tensor offsets = empty({lists, params.kv_blocks + 1}, ScalarType::Int, call.index);
  Tensor listing = empty({lists, params.q_blocks, params.slots}, ScalarType::Int, call.index);
  Tensor longest = empty({lists}, ScalarType::Int, call.index);
  Tensor gradients =
      empty({params.plan.buffers, params.plan.capacity, kBlock, kBlock}, ScalarType::BFloat16, call.index);
  const int64_t summed_blocks = units.has_parts() ? params.kv_blocks : 0;
  Tensor sums = empty({summed_blocks, 2, kBlock, params.columns}, ScalarType::Float, call.index);
  Tensor counters = empty({number_of_counters(params)}, ScalarType::Int, call.index);
  params.dout = heads_of(dout);
  params.out = heads_of(out);
  params.dq = heads_of(dq);
  params.dk = heads_of(dk);
  params.dv = heads_of(dv);
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
  params.rows = static_cast<float*>(rows.data_ptr());
  params.offsets = static_cast<int*>(offsets.data_ptr());
  params.listing = static_cast<int*>(listing.data_ptr());
  params.longest = static_cast<int*>(longest.data_ptr());
  params.gradients = static_cast<char*>(gradients.data_ptr());
  params.sums = static_cast<float*>(sums.data_ptr());
  params.counters = static_cast<int*>(counters.data_ptr());
  params.next_place = static_cast<unsigned long long*>(counters.data_ptr());
  call.check(launch(params, call.stream()));
  return {dq, dk, dv};
}

}  // namespace
}  // namespace dsa::block_sparse_attn_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("block_sparse_attn_bwd", TORCH_BOX(&dsa::block_sparse_attn_bwd::block_sparse_attn_bwd));
}
