// dsa::block_select on CUDA: argument checks, allocation, launch. Definition: docs/block_sparse/block_select.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/block_sparse/block_select/params.h"
#include "torch/abi.h"

namespace dsa::block_select {
namespace {

constexpr char kOp[] = "dsa::block_select";

std::tuple<Tensor, Tensor> block_select(Tensor scores, std::optional<int64_t> topk, double tau, int64_t min_blocks,
                                        double min_ratio, double max_ratio) {
  check_tensor(kOp, "scores", scores, {ScalarType::Float, ScalarType::BFloat16}, {{"B"}, {"H"}, {"Mq"}, {"Mkv"}});
  const int64_t batch = scores.size(0), heads = scores.size(1), q_blocks = scores.size(2), blocks = scores.size(3);
  DSA_CHECK(blocks <= kMaxBlocks, kOp, ": scores must have at most ", kMaxBlocks, " blocks per row, got ", blocks);
  DSA_CHECK(!topk || *topk >= 1, kOp, ": topk must be at least 1, got ", *topk);
  DSA_CHECK(tau > 0 && tau <= 1, kOp, ": tau must be above 0 and at most 1, got ", tau);
  DSA_CHECK(min_blocks >= 0, kOp, ": min_blocks must be at least 0, got ", min_blocks);
  DSA_CHECK(0 <= min_ratio && min_ratio <= max_ratio && max_ratio <= 1, kOp,
            ": min_ratio and max_ratio must be ascending, from 0 to 1, got ", min_ratio, " and ", max_ratio);
  check_last_stride(kOp, "scores", scores);
  const int64_t rows = batch * heads * q_blocks;
  DSA_CHECK(rows <= INT32_MAX, kOp, ": scores must have fewer than 2^31 rows, got ", describe(scores));
  const DeviceCall call(kOp, "scores", scores);

  // The most blocks that a row can keep.
  const auto share = static_cast<int64_t>(std::ceil(max_ratio * static_cast<double>(blocks)));
  const int64_t most = topk ? *topk : std::max(min_blocks, share);
  const int64_t slots = std::max<int64_t>(1, std::min(blocks, most));
  Tensor index = empty({batch, heads, q_blocks, slots}, ScalarType::Int, call.index);
  Tensor num = empty({batch, heads, q_blocks}, ScalarType::Int, call.index);
  const Params params{
      .scores = scores.data_ptr(),
      .index = static_cast<int*>(index.data_ptr()),
      .num = static_cast<int*>(num.data_ptr()),
      .batch_stride = scores.stride(0),
      .head_stride = scores.stride(1),
      .q_block_stride = scores.stride(2),
      .tau = tau,
      .max_ratio = max_ratio,
      .ratio_range = max_ratio - min_ratio,
      .rows = static_cast<int>(rows),
      .heads = static_cast<int>(heads),
      .q_blocks = static_cast<int>(q_blocks),
      .blocks = static_cast<int>(blocks),
      .slots = static_cast<int>(slots),
      .topk = topk ? static_cast<int>(std::min<int64_t>(*topk, kMaxBlocks)) : 0,
      .min_blocks = static_cast<int>(std::min(min_blocks, blocks)),
      .device = call.index,
      .is_bf16 = scores.scalar_type() == ScalarType::BFloat16,
  };
  call.check(launch(params, call.stream()));
  return {index, num};
}

}  // namespace
}  // namespace dsa::block_select

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("block_select", TORCH_BOX(&dsa::block_select::block_select)); }
