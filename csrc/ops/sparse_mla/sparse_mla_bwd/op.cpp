// dsa::sparse_mla_bwd on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mla_bwd.md.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/shared/key_sums/buffers.h"
#include "ops/shared/list_lengths/buffers.h"
#include "ops/shared/merged_lists/buffers.h"
#include "ops/sparse_mla/attn_dist/call.h"
#include "ops/sparse_mla/inputs.h"
#include "ops/sparse_mla/sparse_mla_bwd/config.h"
#include "ops/sparse_mla/sparse_mla_bwd/params.h"
#include "ops/sparse_mla/sparse_mla_bwd/sort_lists.h"
#include "torch/abi.h"

namespace dsa::sparse_mla_bwd {
namespace {

using namespace dsa::sparse_mla;

// Bytes of fp32 sums above which lists are sorted and waves of CTAs wait for earlier ones, so that the sums in use stay
// in L2; and above which sums often come from HBM even so, and are prefetched.
constexpr int64_t kKeepApart = 32 << 20, kPrefetch = 192 << 20;
constexpr char kOp[] = "dsa::sparse_mla_bwd";

// Replaces the lists by ascending ones, in the tensor that it returns.
Tensor sort_lists_of(Params& p, const DeviceCall& call) {
  Tensor sorted = empty({p.batch, p.seq_q, p.groups, p.topk}, ScalarType::Int, call.index);
  auto* const lists = static_cast<int*>(sorted.data_ptr());
  call.check(sort_lists(p, lists, call.stream()));
  p.indices = lists;
  p.indices_stride_b = sorted.stride(0);
  p.indices_stride_s = sorted.stride(1);
  p.indices_stride_g = sorted.stride(2);
  return sorted;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_mla_bwd(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse,
                                                          Tensor indices, std::optional<double> sm_scale, int64_t d_v,
                                                          bool causal, int64_t q_start, int64_t positions_per_key,
                                                          std::optional<Tensor> topk_length,
                                                          std::optional<Tensor> starts, std::optional<Tensor> ends,
                                                          std::optional<Tensor> attn_sink, std::optional<Tensor> dlse,
                                                          bool return_dist, bool deterministic) {
  const Options options{sm_scale, d_v, causal, q_start, positions_per_key, topk_length, starts, ends, attn_sink};
  check_inputs(kOp, q, kv, indices, options);
  const int64_t batch = q.size(0), seq_q = q.size(1), heads = q.size(2), d_qk = q.size(3);
  const int64_t seq_kv = kv.size(1), groups = kv.size(2);
  const auto check_like_forward = [&](const char* name, const Tensor& tensor, ScalarType dtype, bool is_row) {
    if (is_row) {
      check_tensor(kOp, name, tensor, dtype, {{"B", batch}, {"S", seq_q}, {"H", heads}, {"Dv", d_v}});
    } else {
      check_tensor(kOp, name, tensor, dtype, {{"B", batch}, {"S", seq_q}, {"H", heads}});
    }
    check_same_device(kOp, name, tensor, "q", q);
  };
  check_like_forward("dout", dout, ScalarType::BFloat16, true);
  check_like_forward("out", out, ScalarType::BFloat16, true);
  check_like_forward("lse", lse, ScalarType::Float, false);
  if (dlse) check_like_forward("dlse", *dlse, ScalarType::Float, false);
  DSA_CHECK(groups * d_qk < int64_t{1} << 30, kOp, ": kv's groups times d_qk must be less than 2^30, got ", groups,
            " * ", d_qk);
  const DeviceCall call(kOp, "q", q);

  // Gradients arrive in any layout, often expanded from one element.
  dout = aligned_contiguous(dout);
  out = aligned_contiguous(out);
  lse = aligned_contiguous(lse);
  if (dlse) dlse = aligned_contiguous(*dlse);

  Tensor dq = empty({batch, seq_q, heads, d_qk}, ScalarType::BFloat16, call.index);
  Tensor d_sink = empty({attn_sink ? heads : 0}, ScalarType::Float, call.index);
  Tensor sink_terms = empty({attn_sink ? batch * seq_q * heads : 0}, ScalarType::Float, call.index);
  Tensor finished = empty({1}, ScalarType::Int, call.index);
  Tensor dist = return_dist ? empty({head_blocks(heads, groups), batch, seq_q, groups, indices.size(3)},
                                    ScalarType::Float, call.index)
                            : empty({0}, ScalarType::Float, call.index);

  Params params{problem_of(q, kv, indices, options, call)};
  params.dout = dout.data_ptr();
  params.out = out.data_ptr();
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
  params.dq = dq.data_ptr();
  params.d_sink = static_cast<float*>(d_sink.data_ptr());
  params.sink_terms = static_cast<float*>(sink_terms.data_ptr());
  params.deterministic = deterministic;

  const int64_t queries = heads > 0 ? batch * seq_q : 0, keys = batch * seq_kv * groups;
  params.queries_at_once = queries;
  params.pairs = queries > 0 && heads / groups > kBlockHeads;
  if (params.pairs) {
    const int row_bytes = deterministic ? params.d_qk * 2 : 0;
    params.queries_at_once = pair_queries_at_once(queries, params.groups, params.topk, row_bytes, params.num_sms);
  } else if (deterministic && queries > 0) {
    const int64_t room = queries_at_once(groups, params.topk, params.d_qk, params.num_sms);
    params.queries_at_once = std::min(queries, room);
  }
  const int64_t tiles_of_pairs =
      params.pairs ? params.queries_at_once * groups * ((params.topk + kBlockK - 1) / kBlockK) : 0;
  Tensor dscores = empty({tiles_of_pairs, 2 * kBlockHeads, kBlockK}, ScalarType::BFloat16, call.index);
  params.dscores = dscores.data_ptr();
  const auto parts_of = [&](int64_t queries_of_launch) {
    const int64_t items = queries_of_launch * groups;
    const Plan plan = plan_items(items, params.topk, params.num_sms);
    return (items - plan.whole) * plan.parts;
  };
  const int64_t last_queries = queries > 0 ? queries % params.queries_at_once : 0;
  int64_t parts = params.pairs ? 0 : std::max(parts_of(params.queries_at_once), parts_of(last_queries));
  std::optional<Tensor> lists;
  params.merged =
      !deterministic && heads > 0 && merged_lists::are_merged(params.heads, groups, batch, seq_q, params.topk, seq_kv);
  if (params.merged) {
    params.conditions = {.finite = true, .dout = params.dout, .d_v = params.d_v};
    lists = merged_lists::allocate(params, kMostMergedPercent, params.lists);
    parts = params.num_sms;
  }
  Tensor dq_parts = empty({parts, kBlockHeads, d_qk}, ScalarType::Float, call.index);
  params.dq_parts = static_cast<float*>(dq_parts.data_ptr());

  const bool adds_up = !deterministic || params.queries_at_once < queries;
  const int64_t slots = deterministic ? params.queries_at_once * groups * params.topk : 0;
  params.dkv.keys = keys;
  params.dkv.columns = params.d_qk;
  params.dkv.device = call.index;
  params.dkv.blocks = 1;
  const auto dkv_buffers = key_sums::allocate(params.dkv, {batch, seq_kv, groups, d_qk}, adds_up, slots, slots);
  if (!deterministic) {
    const int64_t sum_bytes = keys * d_qk * static_cast<int64_t>(sizeof(float));
    params.finished = sum_bytes > kKeepApart ? static_cast<int*>(finished.data_ptr()) : nullptr;
    params.spread = params.finished == nullptr;
    params.prefetch_sums = sum_bytes > kPrefetch;
  }

  if (dist.numel() > 0) {
    // The main kernel has P of one query's heads, unless a sink is part of it.
    if (!params.merged && !attn_sink) {
      zero_(dist);
      params.dist = static_cast<float*>(dist.data_ptr());
    } else {
      listed_keys::Params sums{params,
                               params.lse,
                               int64_t{seq_q} * heads,
                               heads,
                               1,
                               static_cast<float*>(dist.data_ptr()),
                               false,
                               /*per_head_block=*/true};
      attn_dist::compute(sums, call);
    }
  }

  // The main kernel writes sums of P in the order of the lists that it reads.
  std::optional<Tensor> sorted;
  if (params.finished != nullptr && params.dist == nullptr && queries > 0 && params.topk <= kMaxSortedSlots) {
    sorted = sort_lists_of(params, call);
  }
  std::optional<Tensor> lengths;
  if (!params.merged) lengths = list_lengths::find(params, call);  // merged lists have no padding
  call.check(launch(params, call.stream()));
  return {dq, dkv_buffers.front(), d_sink, dist};
}

}  // namespace
}  // namespace dsa::sparse_mla_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mla_bwd", TORCH_BOX(&dsa::sparse_mla_bwd::sparse_mla_bwd)); }
