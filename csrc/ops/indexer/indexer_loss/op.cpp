// dsa::indexer_loss on CUDA: argument checks, allocation, launch. Math: docs/indexer/indexer_loss.md.
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/indexer/indexer_loss/params.h"
#include "torch/abi.h"

namespace dsa::indexer_loss {
namespace {

constexpr char kOp[] = "dsa::indexer_loss";

std::tuple<Tensor, Tensor> indexer_loss(Tensor scores, Tensor p, std::optional<Tensor> valid,
                                        std::optional<Tensor> row_weights) {
  check_tensor(kOp, "scores", scores, ScalarType::Float, {{"R"}, {"K"}});
  const int64_t rows = scores.size(0), slots = scores.size(1);
  check_tensor(kOp, "p", p, ScalarType::Float, {{"R", rows}, {"K", slots}});
  if (valid) check_tensor(kOp, "valid", *valid, ScalarType::Bool, {{"R", rows}, {"K", slots}});
  if (row_weights) check_tensor(kOp, "row_weights", *row_weights, ScalarType::Float, {{"R", rows}});
  check_positions(kOp, "scores", scores, 1);
  check_last_stride(kOp, "scores", scores);
  check_last_stride(kOp, "p", p);
  if (valid) check_last_stride(kOp, "valid", *valid);
  check_same_device(kOp, "p", p, "scores", scores);
  if (valid) check_same_device(kOp, "valid", *valid, "scores", scores);
  if (row_weights) check_same_device(kOp, "row_weights", *row_weights, "scores", scores);
  const DeviceCall call(kOp, "scores", scores);

  Tensor loss = empty({rows}, ScalarType::Float, call.index);
  Tensor dscores = empty({rows, slots}, ScalarType::Float, call.index);
  const Params params{
      .scores = static_cast<const float*>(scores.data_ptr()),
      .p = static_cast<const float*>(p.data_ptr()),
      .valid = valid ? static_cast<const bool*>(valid->data_ptr()) : nullptr,
      .row_weights = row_weights ? static_cast<const float*>(row_weights->data_ptr()) : nullptr,
      .loss = static_cast<float*>(loss.data_ptr()),
      .dscores = static_cast<float*>(dscores.data_ptr()),
      .scores_stride = scores.stride(0),
      .p_stride = p.stride(0),
      .valid_stride = valid ? valid->stride(0) : 0,
      .row_weights_stride = row_weights ? row_weights->stride(0) : 0,
      .rows = static_cast<int>(rows),
      .slots = static_cast<int>(slots),
      .device = call.index,
  };
  call.check(launch(params, call.stream()));
  return {loss, dscores};
}

}  // namespace
}  // namespace dsa::indexer_loss

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_loss", TORCH_BOX(&dsa::indexer_loss::indexer_loss)); }
