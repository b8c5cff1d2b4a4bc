// dsa::gated_fusion_fwd and its gradients on CUDA: argument checks, allocation, launch. Math:
// docs/block_sparse/gated_fusion.md.
#include <cstdint>
#include <tuple>
#include <utility>

#include "ops/block_sparse/gated_fusion/params.h"
#include "ops/block_sparse/inputs.h"
#include "torch/abi.h"

namespace dsa::gated_fusion {
namespace {

constexpr char kForward[] = "dsa::gated_fusion_fwd", kBackward[] = "dsa::gated_fusion_bwd";

// All checks that need no device, so that they are tested without one.
void check_inputs(const char* op, const Tensor& fine, const Tensor& coarse, const Tensor& gate) {
  check_tensor(op, "fine", fine, ScalarType::BFloat16, {{"B"}, {"H"}, {"N"}, {"D"}});
  const Dim batch{"B", fine.size(0)}, heads{"H", fine.size(1)}, positions{"N", fine.size(2)};
  check_tensor(op, "coarse", coarse, ScalarType::BFloat16, {batch, heads, positions, {"D", fine.size(3)}});
  check_tensor(op, "gate", gate, {ScalarType::BFloat16, ScalarType::Float}, {batch, heads, positions});
  DSA_CHECK(fine.size(3) == 64 || fine.size(3) == 128, op, ": fine's head dimension must be 64 or 128, got ",
            fine.size(3));
  DSA_CHECK(gate.numel() <= INT32_MAX, op, ": fine must have fewer than 2^31 rows, got ", describe(fine));
  check_rows_aligned(op, "fine", fine);
  check_rows_aligned(op, "coarse", coarse);
  check_same_device(op, "coarse", coarse, "fine", fine);
  check_same_device(op, "gate", gate, "fine", fine);
}

// Rows are taken in the order that `fine` has in memory.
bool heads_are_inner(const Tensor& fine) { return fine.stride(1) < fine.stride(2); }

Heads rows_of(const Tensor& tensor, bool swap) {
  Heads rows{tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  if (swap) std::swap(rows.stride_h, rows.stride_n);
  return rows;
}

Inputs inputs_of(const Tensor& fine, const Tensor& coarse, const Tensor& gate) {
  const bool swap = heads_are_inner(fine);
  return {
      .fine = rows_of(fine, swap),
      .coarse = rows_of(coarse, swap),
      .gate = rows_of(gate, swap),
      .heads = static_cast<unsigned>(fine.size(swap ? 2 : 1)),
      .positions = static_cast<unsigned>(fine.size(swap ? 1 : 2)),
      .rows = static_cast<unsigned>(gate.numel()),
      .columns = static_cast<unsigned>(fine.size(3)),
      .device = fine.get_device_index(),
      .gate_is_bf16 = gate.scalar_type() == ScalarType::BFloat16,
  };
}

Tensor gated_fusion_fwd(Tensor fine, Tensor coarse, Tensor gate) {
  check_inputs(kForward, fine, coarse, gate);
  const DeviceCall call(kForward, "fine", fine);

  Tensor out = empty_rows_like(fine, call.index);
  const Forward params{inputs_of(fine, coarse, gate), rows_of(out, heads_are_inner(fine))};
  call.check(launch(params, call.stream()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_fusion_bwd(Tensor dout, Tensor fine, Tensor coarse, Tensor gate) {
  check_inputs(kBackward, fine, coarse, gate);
  check_tensor(kBackward, "dout", dout, ScalarType::BFloat16,
               {{"B", fine.size(0)}, {"H", fine.size(1)}, {"N", fine.size(2)}, {"D", fine.size(3)}});
  check_same_device(kBackward, "dout", dout, "fine", fine);
  const DeviceCall call(kBackward, "fine", fine);

  Tensor dfine = empty_rows_like(fine, call.index);
  Tensor dcoarse = empty_rows_like(coarse, call.index);
  Tensor dgate = empty_like(gate, call.index);
  dout = block_sparse::with_aligned_rows(dout);
  const bool swap = heads_are_inner(fine);
  const Backward params{
      .in = inputs_of(fine, coarse, gate),
      .dout = rows_of(dout, swap),
      .dfine = rows_of(dfine, swap),
      .dcoarse = rows_of(dcoarse, swap),
      .dgate = rows_of(dgate, swap),
  };
  call.check(launch(params, call.stream()));
  return {dfine, dcoarse, dgate};
}

}  // namespace
}  // namespace dsa::gated_fusion

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("gated_fusion_fwd", TORCH_BOX(&dsa::gated_fusion::gated_fusion_fwd));
  m.impl("gated_fusion_bwd", TORCH_BOX(&dsa::gated_fusion::gated_fusion_bwd));
}
