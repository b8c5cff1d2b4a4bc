// dsa::mhc_pre_bwd on CUDA: argument checks, allocation, launch. Math: docs/mhc/mhc_pre.md.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/mhc/inputs.h"
#include "ops/mhc/mhc_pre_bwd/params.h"
#include "torch/abi.h"

namespace dsa::mhc_pre_bwd {
namespace {

constexpr char kOp[] = "dsa::mhc_pre_bwd";

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mhc_pre_bwd(Tensor dh_in, Tensor dh_post, Tensor dh_res, Tensor x,
                                                               Tensor phi, Tensor alpha, std::optional<Tensor> gamma,
                                                               Tensor h_post, Tensor inv_rms, Tensor h_mix,
                                                               Tensor h_pre, double eps) {
  mhc::check_streams(kOp, x);
  mhc::check_parameters(kOp, x, phi, alpha, gamma, eps);
  const int64_t streams = x.size(2), columns = x.size(3), mixed = streams * streams + 2 * streams;
  const Dim batch{"B", x.size(0)}, length{"S", x.size(1)};
  check_tensor(kOp, "dh_in", dh_in, ScalarType::BFloat16, {batch, length, {"D", columns}});
  check_tensor(kOp, "dh_post", dh_post, ScalarType::Float, {batch, length, {"M", streams}});
  check_tensor(kOp, "dh_res", dh_res, ScalarType::Float, {batch, length, {"M", streams}, {"N", streams}});
  check_tensor(kOp, "h_post", h_post, ScalarType::Float, {batch, length, {"M", streams}});
  check_tensor(kOp, "inv_rms", inv_rms, ScalarType::Float, {batch, length});
  check_tensor(kOp, "h_mix", h_mix, ScalarType::Float, {batch, length, {"M", mixed}});
  check_tensor(kOp, "h_pre", h_pre, ScalarType::Float, {batch, length, {"M", streams}});
  for (const auto& [name, tensor] : {std::pair<const char*, Tensor*>{"dh_in", &dh_in},
                                     {"dh_post", &dh_post},
                                     {"dh_res", &dh_res},
                                     {"phi", &phi},
                                     {"alpha", &alpha},
                                     {"h_post", &h_post},
                                     {"inv_rms", &inv_rms},
                                     {"h_mix", &h_mix},
                                     {"h_pre", &h_pre}}) {
    check_same_device(kOp, name, *tensor, "x", x);
    *tensor = aligned_contiguous(*tensor);
  }
  if (gamma) gamma = aligned_contiguous(*gamma);
  const DeviceCall call(kOp, "x", x);

  x = aligned_contiguous(x);
  const int64_t tokens = x.size(0) * x.size(1), flat = streams * columns;
  // Without tokens there are no runs, and empty sums are zero.
  const int64_t tiles = (tokens + kTokens - 1) / kTokens, slices = columns / kColumns;
  const int64_t slots = ctas_per_sm(static_cast<int>(streams)) * call.num_sms;
  const int64_t runs = std::min(std::max<int64_t>(slots / slices, 1), tiles);
  const int64_t sums = tiles * slices * kTokens * streams;
  const int64_t messages_count = sums + tiles * kTokens * pitch_of(static_cast<int>(streams)) / 2;
  const auto floats = [&](std::initializer_list<int64_t> sizes) { return empty(sizes, ScalarType::Float, call.index); };
  Tensor dx = empty({x.size(0), x.size(1), streams, columns}, ScalarType::BFloat16, call.index);
  Tensor dphi = floats({mixed, flat}), dalpha = floats({3}), dbias = floats({mixed}),
         dgamma = floats({gamma ? flat : 0});
  Tensor terms = floats({2, mixed, tokens}), parts = floats({runs, mixed, flat});
  Tensor messages = floats({messages_count});
  const auto read = [](const Tensor& tensor) { return static_cast<const float*>(tensor.data_ptr()); };
  const auto write = [](const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); };
  const Params params{
      .x = x.data_ptr(),
      .dh_in = dh_in.data_ptr(),
      .dh_post = read(dh_post),
      .dh_res = read(dh_res),
      .phi = read(phi),
      .alpha = read(alpha),
      .gamma = gamma ? read(*gamma) : nullptr,
      .h_post = read(h_post),
      .inv_rms = read(inv_rms),
      .h_mix = read(h_mix),
      .h_pre = read(h_pre),
      .dx = dx.data_ptr(),
      .dphi = write(dphi),
      .dalpha = write(dalpha),
      .dbias = write(dbias),
      .dgamma = write(dgamma),
      .eps = static_cast<float>(eps),
      .terms = write(terms),
      .parts = write(parts),
      .messages = write(messages),
      .message_bytes = messages_count * static_cast<int64_t>(sizeof(float)),
      .sums = write(messages),
      .gates = write(messages) + sums,
      .tokens = static_cast<int>(tokens),
      .streams = static_cast<int>(streams),
      .columns = static_cast<int>(columns),
      .runs = static_cast<int>(runs),
      .patience = slices <= slots ? kPatience + 8 * static_cast<int>(tiles) : 1,
      .device = call.index,
  };
  call.check(launch(params, call.stream()));
  return {dx, dphi, dalpha, dbias, dgamma};
}

}  // namespace
}  // namespace dsa::mhc_pre_bwd

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("mhc_pre_bwd", TORCH_BOX(&dsa::mhc_pre_bwd::mhc_pre_bwd)); }
