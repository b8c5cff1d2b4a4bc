// dsa::topk_select on CUDA: argument checks, allocation, launch. Definition: docs/indexer/topk_select.md.
#include <tuple>

#include "ops/indexer/topk_select/config.h"
#include "ops/indexer/topk_select/params.h"
#include "torch/abi.h"

namespace dsa::topk_select {
namespace {

constexpr char kOp[] = "dsa::topk_select";

std::tuple<Tensor, Tensor> topk_select(Tensor logits, Tensor starts, Tensor ends, int64_t topk) {
  check_tensor(kOp, "logits", logits, {ScalarType::Float, ScalarType::BFloat16}, {{"R"}, {"C"}});
  const int64_t rows = logits.size(0);
  check_positions(kOp, "logits", logits, 1);
  check_tensor(kOp, "starts", starts, ScalarType::Int, {{"R", rows}});
  check_tensor(kOp, "ends", ends, ScalarType::Int, {{"R", rows}});
  check_topk(kOp, topk);
  check_last_stride(kOp, "logits", logits);
  check_same_device(kOp, "starts", starts, "logits", logits);
  check_same_device(kOp, "ends", ends, "logits", logits);
  const DeviceCall call(kOp, "logits", logits);

  Tensor indices = empty({rows, topk}, ScalarType::Int, call.index);
  Tensor values = empty({rows, topk}, logits.scalar_type(), call.index);
  const int columns = static_cast<int>(logits.size(1));
  const Params params{
      .logits = logits.data_ptr(),
      .starts = static_cast<const int*>(starts.data_ptr()),
      .ends = static_cast<const int*>(ends.data_ptr()),
      .indices = static_cast<int*>(indices.data_ptr()),
      .values = values.data_ptr(),
      .logits_stride = logits.stride(0),
      .starts_stride = starts.stride(0),
      .ends_stride = ends.stride(0),
      .rows = static_cast<int>(rows),
      .columns = columns,
      .topk = static_cast<int>(topk),
      .ctas = plan_ctas(rows, columns, call.num_sms),
      .device = call.index,
      .num_sms = call.num_sms,
      .is_bf16 = logits.scalar_type() == ScalarType::BFloat16,
      .skips_empty = false,
      .programmatic = false,
  };
  call.check(launch(params, call.stream()));
  return {indices, values};
}

}  // namespace

void check_topk(const char* op, int64_t topk) {
  DSA_CHECK(topk >= 1 && topk <= kMaxTopk, op, ": topk must be from 1 to ", kMaxTopk, ", got ", topk);
}

}  // namespace dsa::topk_select

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("topk_select", TORCH_BOX(&dsa::topk_select::topk_select)); }
