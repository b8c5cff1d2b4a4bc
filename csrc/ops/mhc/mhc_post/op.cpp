// dsa::mhc_post_fwd and dsa::mhc_post_bwd on CUDA: argument checks, allocation, launch. Math: docs/mhc/mhc_post.md.
#include <cstdint>
#include <tuple>

#include "ops/mhc/inputs.h"
#include "ops/mhc/mhc_post/params.h"
#include "torch/abi.h"

namespace dsa::mhc_post {
namespace {

constexpr char kForward[] = "dsa::mhc_post_fwd", kBackward[] = "dsa::mhc_post_bwd";

// All checks that need no device, so that they are tested without one.
void check_inputs(const char* op, const Tensor& x, const Tensor& y, const Tensor& h_post, const Tensor& h_res,
                  int64_t iterations) {
  mhc::check_streams(op, x);
  const int64_t streams = x.size(2), columns = x.size(3);
  const Dim batch{"B", x.size(0)}, length{"S", x.size(1)};
  check_tensor(op, "y", y, ScalarType::BFloat16, {batch, length, {"D", columns}});
  check_tensor(op, "h_post", h_post, ScalarType::Float, {batch, length, {"M", streams}});
  check_tensor(op, "h_res", h_res, ScalarType::Float, {batch, length, {"M", streams}, {"N", streams}});
  DSA_CHECK(iterations >= 1 && iterations <= kMaxIterations, op, ": iterations must be from 1 to ", kMaxIterations,
            ", got ", iterations);
  check_same_device(op, "y", y, "x", x);
  check_same_device(op, "h_post", h_post, "x", x);
  check_same_device(op, "h_res", h_res, "x", x);
}

Params params_of(const Tensor& x, const Tensor& y, const Tensor& h_post, const Tensor& h_res, int64_t iterations) {
  return {
      .x = x.data_ptr(),
      .y = y.data_ptr(),
      .h_post = static_cast<const float*>(h_post.data_ptr()),
      .h_res = static_cast<const float*>(h_res.data_ptr()),
      .tokens = static_cast<int>(x.size(0) * x.size(1)),
      .streams = static_cast<int>(x.size(2)),
      .columns = static_cast<int>(x.size(3)),
      .iterations = static_cast<int>(iterations),
      .device = x.get_device_index(),
  };
}

Tensor mhc_post_fwd(Tensor x, Tensor y, Tensor h_post, Tensor h_res, int64_t iterations) {
  check_inputs(kForward, x, y, h_post, h_res, iterations);
  const DeviceCall call(kForward, "x", x);

  Tensor out = empty({x.size(0), x.size(1), x.size(2), x.size(3)}, ScalarType::BFloat16, call.index);
  if (out.numel() == 0) return out;
  for (Tensor* tensor : {&x, &y, &h_post, &h_res}) *tensor = aligned_contiguous(*tensor);
  const Tensor mixing = empty_like(h_res, call.index);
  Params params = params_of(x, y, h_post, h_res, iterations);
  params.mixing = static_cast<float*>(mixing.data_ptr());
  params.out = out.data_ptr();
  call.check(launch_fwd(params, call.stream()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mhc_post_bwd(Tensor dout, Tensor x, Tensor y, Tensor h_post, Tensor h_res,
                                                        int64_t iterations) {
  check_inputs(kBackward, x, y, h_post, h_res, iterations);
  const int64_t batch = x.size(0), length = x.size(1), streams = x.size(2), columns = x.size(3);
  check_tensor(kBackward, "dout", dout, ScalarType::BFloat16,
               {{"B", batch}, {"S", length}, {"n", streams}, {"D", columns}});
  check_same_device(kBackward, "dout", dout, "x", x);
  const DeviceCall call(kBackward, "x", x);

  Tensor dx = empty({batch, length, streams, columns}, ScalarType::BFloat16, call.index);
  Tensor dy = empty({batch, length, columns}, ScalarType::BFloat16, call.index);
  Tensor dh_post = empty({batch, length, streams}, ScalarType::Float, call.index);
  Tensor dh_res = empty({batch, length, streams, streams}, ScalarType::Float, call.index);
  if (dx.numel() == 0) return {dx, dy, dh_post, dh_res};
  for (Tensor* tensor : {&dout, &x, &y, &h_post, &h_res}) *tensor = aligned_contiguous(*tensor);
  const Tensor mixing = empty_like(h_res, call.index);
  Params params = params_of(x, y, h_post, h_res, iterations);
  params.mixing = static_cast<float*>(mixing.data_ptr());
  params.dout = dout.data_ptr(), params.out = dx.data_ptr(), params.dy = dy.data_ptr();
  params.dh_post = static_cast<float*>(dh_post.data_ptr()), params.dh_res = static_cast<float*>(dh_res.data_ptr());
  call.check(launch_bwd(params, call.stream()));
  return {dx, dy, dh_post, dh_res};
}

}  // namespace
}  // namespace dsa::mhc_post

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("mhc_post_fwd", TORCH_BOX(&dsa::mhc_post::mhc_post_fwd));
  m.impl("mhc_post_bwd", TORCH_BOX(&dsa::mhc_post::mhc_post_bwd));
}
