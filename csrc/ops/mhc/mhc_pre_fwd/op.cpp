// dsa::mhc_pre_fwd on CUDA: argument checks, allocation, launch. Math: docs/mhc/mhc_pre.md.
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/mhc/inputs.h"
#include "ops/mhc/mhc_pre_fwd/params.h"
#include "torch/abi.h"

namespace dsa::mhc_pre_fwd {
namespace {

constexpr char kOp[] = "dsa::mhc_pre_fwd";

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mhc_pre_fwd(Tensor x, Tensor phi, Tensor alpha, Tensor bias,
                                                                       std::optional<Tensor> gamma, double eps) {
  mhc::check_streams(kOp, x);
  mhc::check_parameters(kOp, x, phi, alpha, gamma, eps);
  const int64_t batch = x.size(0), length = x.size(1), streams = x.size(2), columns = x.size(3);
  const int64_t mixed = streams * streams + 2 * streams;
  check_tensor(kOp, "bias", bias, ScalarType::Float, {{"M", mixed}});
  check_same_device(kOp, "bias", bias, "x", x);
  const DeviceCall call(kOp, "x", x);

  Tensor h_in = empty({batch, length, columns}, ScalarType::BFloat16, call.index);
  Tensor h_post = empty({batch, length, streams}, ScalarType::Float, call.index);
  Tensor h_res = empty({batch, length, streams, streams}, ScalarType::Float, call.index);
  Tensor inv_rms = empty({batch, length}, ScalarType::Float, call.index);
  Tensor h_mix = empty({batch, length, mixed}, ScalarType::Float, call.index);
  Tensor h_pre = empty({batch, length, streams}, ScalarType::Float, call.index);
  if (h_in.numel() == 0) return {h_in, h_post, h_res, inv_rms, h_mix, h_pre};
  x = aligned_contiguous(x), phi = aligned_contiguous(phi), alpha = aligned_contiguous(alpha);
  bias = aligned_contiguous(bias);
  if (gamma) gamma = aligned_contiguous(*gamma);
  const auto floats = [](const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); };
  const Params params{
      .x = x.data_ptr(),
      .phi = floats(phi),
      .alpha = floats(alpha),
      .bias = floats(bias),
      .gamma = gamma ? floats(*gamma) : nullptr,
      .h_in = h_in.data_ptr(),
      .h_post = floats(h_post),
      .h_res = floats(h_res),
      .inv_rms = floats(inv_rms),
      .h_mix = floats(h_mix),
      .h_pre = floats(h_pre),
      .eps = static_cast<float>(eps),
      .tokens = static_cast<int>(batch * length),
      .streams = static_cast<int>(streams),
      .columns = static_cast<int>(columns),
      .device = call.index,
  };
  call.check(launch(params, call.stream()));
  return {h_in, h_post, h_res, inv_rms, h_mix, h_pre};
}

}  // namespace
}  // namespace dsa::mhc_pre_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("mhc_pre_fwd", TORCH_BOX(&dsa::mhc_pre_fwd::mhc_pre_fwd)); }
