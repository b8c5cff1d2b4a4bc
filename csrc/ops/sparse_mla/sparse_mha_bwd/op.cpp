// dsa::sparse_mha_bwd on CUDA: argument checks, allocation, launch. Math: docs/sparse_mla/sparse_mha.md.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/sparse_mla/sparse_mha/inputs.h"
#include "ops/sparse_mla/sparse_mha_bwd/params.h"
#include "torch/abi.h"

namespace dsa::sparse_mha_bwd {
namespace {

using namespace dsa::sparse_mha;

constexpr char kOp[] = "dsa::sparse_mha_bwd";
// dS takes about so many bytes, or what a head for each buffer needs if that is more.
constexpr int64_t kScoreBytes = int64_t{5} << 28;
// CTAs of a kernel of gradients of keys for each SM, and heads of one CTA.
constexpr int64_t kCtasPerSm = 2, kMaxHeadsTogether = 8;

// The most tiles of a head that may have a bit; one if the causal rule and the window leave none.
int64_t tiles_per_head(const MaskedProblem& masked) {
  const Mask& mask = masked.problem.mask;
  int64_t tiles = 0;
  for (int64_t block = 0; block < mask.q_blocks; ++block) tiles += most_key_blocks(masked.lists, mask, block);
  return std::max<int64_t>(1, tiles);
}

void divide_heads(Params& p) {
  const int64_t heads = p.heads, bytes = p.batch * p.tiles_per_head * kTileBytes;
  const int64_t fitting = std::max<int64_t>(1, kScoreBytes / kBuffers / bytes);
  const int64_t launches = (heads + fitting - 1) / fitting;
  const int64_t at_once = (heads + launches - 1) / launches;
  const int64_t most = int64_t{p.batch} * p.mask.kv_blocks * at_once / (kCtasPerSm * p.num_sms);
  const int64_t together = std::clamp<int64_t>(most, 1, std::min(at_once, kMaxHeadsTogether));
  const int64_t rounded = (at_once + together - 1) / together * together;
  p.heads_together = static_cast<int>(together);
  p.heads_at_once = static_cast<int>(rounded <= fitting ? rounded : rounded - together);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_mha_bwd(Tensor dout, Tensor q, Tensor k, Tensor k_rope, Tensor v,
                                                          Tensor out, Tensor lse, Tensor indices,
                                                          std::optional<double> sm_scale, bool causal, int64_t q_start,
                                                          std::optional<Tensor> starts, std::optional<Tensor> ends,
                                                          std::optional<int64_t> window, std::optional<Tensor> dlse) {
  const Inputs inputs{q, k, k_rope, indices, v, sm_scale, causal, q_start, starts, ends, window};
  check_inputs(kOp, inputs);
  const Dim batch{"B", q.size(0)}, seq{"S", q.size(1)}, heads{"H", q.size(2)}, columns{"Dv", kValueColumns};
  check_tensor(kOp, "dout", dout, ScalarType::BFloat16, {batch, seq, heads, columns});
  check_tensor(kOp, "out", out, ScalarType::BFloat16, {batch, seq, heads, columns});
  check_tensor(kOp, "lse", lse, ScalarType::Float, {batch, seq, heads});
  if (dlse) check_tensor(kOp, "dlse", *dlse, ScalarType::Float, {batch, seq, heads});
  check_same_device(kOp, "dout", dout, "q", q);
  check_same_device(kOp, "out", out, "q", q);
  check_same_device(kOp, "lse", lse, "q", q);
  if (dlse) check_same_device(kOp, "dlse", *dlse, "q", q);
  const DeviceCall call(kOp, "q", q);

  const auto like = [&](const Tensor& x, int64_t columns_of_x) {
    return empty({x.size(0), x.size(1), x.size(2), columns_of_x}, ScalarType::BFloat16, call.index);
  };
  Tensor dq = like(q, kColumns), dk = like(k, kNope), dv = like(v, kValueColumns);
  Tensor dk_rope = empty({k.size(0), k.size(1), kRope}, ScalarType::BFloat16, call.index);
  if (inputs.empty()) return {zero_(dq), zero_(dk), zero_(dk_rope), zero_(dv)};
  dout = aligned_contiguous(dout);
  out = aligned_contiguous(out);
  lse = aligned_contiguous(lse);
  if (dlse) dlse = aligned_contiguous(*dlse);

  const MaskedProblem masked(inputs, call, Bits::kQueries);
  Params params{masked.problem};
  params.tiles_per_head = tiles_per_head(masked);
  divide_heads(params);
  const int64_t q_blocks = params.mask.q_blocks, parts = divide_up(params.heads, params.heads_together);
  Tensor rows = empty({params.batch, params.heads, q_blocks * 2, 2, kBlock / 2}, ScalarType::Float, call.index);
  Tensor offsets = empty({params.batch, q_blocks, params.mask.tile_words}, ScalarType::Int, call.index);
  const int64_t launches = divide_up(params.heads, params.heads_at_once);
  Tensor scores = empty(
      {std::min<int64_t>(kBuffers, launches), params.batch, params.heads_at_once, params.tiles_per_head, kTileBytes},
      ScalarType::Byte, call.index);
  Tensor dk_rope_parts = empty({parts, params.batch, params.seq_kv, kRope}, ScalarType::Float, call.index);
  params.dout = heads_of(dout);
  params.out = heads_of(out);
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
  params.dq = heads_of(dq);
  params.dk = heads_of(dk);
  params.dv = heads_of(dv);
  params.dk_rope = dk_rope.data_ptr();
  params.rows = static_cast<float*>(rows.data_ptr());
  params.tile_offsets = static_cast<int*>(offsets.data_ptr());
  params.dscores = scores.data_ptr();
  params.dk_rope_parts = static_cast<float*>(dk_rope_parts.data_ptr());
  call.check(launch(params, call.stream()));
  return {dq, dk, dk_rope, dv};
}

}  // namespace
}  // namespace dsa::sparse_mha_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("sparse_mha_bwd", TORCH_BOX(&dsa::sparse_mha_bwd::sparse_mha_bwd)); }
