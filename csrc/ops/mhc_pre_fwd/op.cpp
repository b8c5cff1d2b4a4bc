// dsa::mhc_pre_fwd on CUDA: argument checks, allocation, launch. docs/mhc.md has the maths.
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/mhc_pre_fwd/params.h"
#include "torch/abi.h"

namespace dsa::mhc_pre_fwd {
namespace {

constexpr char kOp[] = "dsa::mhc_pre_fwd";
constexpr int64_t kMaxColumns = 8192;  // of which the registers of a cluster hold phi

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mhc_pre_fwd(Tensor x, Tensor phi, Tensor alpha, Tensor bias,
                                                                       std::optional<Tensor> gamma, double eps) {
  check_tensor(kOp, "x", x, ScalarType::BFloat16, {{"B"}, {"S"}, {"n"}, {"D"}});
  const int64_t batch = x.size(0), length = x.size(1), streams = x.size(2), columns = x.size(3);
  DSA_CHECK(streams == 2 || streams == 4, kOp, ": x must have 2 or 4 streams, got ", streams);
  DSA_CHECK(columns > 0 && columns % 128 == 0 && columns <= kMaxColumns, kOp,
            ": x's columns must be a multiple of 128, at most ", kMaxColumns, ", got ", columns);
  const int64_t mixed = streams * streams + 2 * streams;
  check_tensor(kOp, "phi", phi, ScalarType::Float, {{"M", mixed}, {"C", streams * columns}});
  check_tensor(kOp, "alpha", alpha, ScalarType::Float, {{"A", 3}});
  check_tensor(kOp, "bias", bias, ScalarType::Float, {{"M", mixed}});
  if (gamma) check_tensor(kOp, "gamma", *gamma, ScalarType::Float, {{"C", streams * columns}});
  DSA_CHECK(eps >= 0 && eps < 1, kOp, ": eps must be from 0 to less than 1, got ", eps);
  check_same_device(kOp, "phi", phi, "x", x);
  check_same_device(kOp, "alpha", alpha, "x", x);
  check_same_device(kOp, "bias", bias, "x", x);
  if (gamma) check_same_device(kOp, "gamma", *gamma, "x", x);
  hopper_device(kOp, "x", x);
  const int device_index = x.get_device_index();
  const DeviceGuard guard(device_index);

  Tensor h_in = empty({batch, length, columns}, ScalarType::BFloat16, device_index);
  Tensor h_post = empty({batch, length, streams}, ScalarType::Float, device_index);
  Tensor h_res = empty({batch, length, streams, streams}, ScalarType::Float, device_index);
  Tensor inv_rms = empty({batch, length}, ScalarType::Float, device_index);
  Tensor h_mix = empty({batch, length, mixed}, ScalarType::Float, device_index);
  Tensor h_pre = empty({batch, length, streams}, ScalarType::Float, device_index);
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
      .device = device_index,
  };
  const char* error = launch(params, current_stream(device_index));
  DSA_CHECK(error == nullptr, kOp, ": launch failed: ", error);
  return {h_in, h_post, h_res, inv_rms, h_mix, h_pre};
}

}  // namespace
}  // namespace dsa::mhc_pre_fwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("mhc_pre_fwd", TORCH_BOX(&dsa::mhc_pre_fwd::mhc_pre_fwd)); }
