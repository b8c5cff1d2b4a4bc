// dsa::fp8_gemm on CUDA: argument checks, allocation, launch. Math: docs/fp8/fp8_gemm.md.
#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/fp8/fp8_gemm/params.h"
#include "torch/abi.h"

namespace dsa::fp8_gemm {
namespace {

constexpr char kOp[] = "dsa::fp8_gemm";
constexpr int64_t kLibraryWidthMultiple = 16;  // N must be a multiple of this for the library

// All checks that need no device, so that they are tested without one.
void check_inputs(const Tensor& a, const Tensor& a_s, const Tensor& b, const Tensor& b_s) {
  check_tensor(kOp, "a", a, ScalarType::Float8_e4m3fn, {{"M"}, {"K"}});
  const int64_t rows = a.size(0), columns = a.size(1);
  DSA_CHECK(columns % kBlock == 0, kOp, ": a's columns must be a multiple of 128, got ", describe(a));
  check_tensor(kOp, "b", b, ScalarType::Float8_e4m3fn, {{"N"}, {"K", columns}});
  const int64_t width = b.size(0), blocks = columns / kBlock;
  check_tensor(kOp, "a_s", a_s, ScalarType::Float, {{"M", rows}, {"Kb", blocks}});
  check_tensor(kOp, "b_s", b_s, ScalarType::Float, {{"Nb", (width + kBlock - 1) / kBlock}, {"Kb", blocks}});
  DSA_CHECK(std::max({rows, width, columns}) <= INT32_MAX, kOp, ": sizes must be less than 2^31, got ", describe(a),
            " and ", describe(b));
  check_rows_aligned(kOp, "a", a);
  check_rows_aligned(kOp, "b", b);
  check_same_device(kOp, "a_s", a_s, "a", a);
  check_same_device(kOp, "b", b, "a", a);
  check_same_device(kOp, "b_s", b_s, "a", a);
}

// The library's product, called through Python. An error would lose its message on the way here, so Python returns a
// tensor of one dimension if the library is not available.
Tensor multiply_many_rows(const Tensor& a, const Tensor& a_s, const Tensor& b, const Tensor& b_s) {
  std::array<StableIValue, 4> stack{torch::stable::detail::from(a), torch::stable::detail::from(a_s),
                                    torch::stable::detail::from(b), torch::stable::detail::from(b_s)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("dsa::_fp8_gemm_many_rows", "", stack.data(), TORCH_ABI_VERSION));
  const auto out = torch::stable::detail::to<Tensor>(stack[0]);
  DSA_CHECK(out.dim() == 2, kOp, ": more than ", kMaxRows, " rows need a torch for CUDA 12.9 or later");
  return out;
}

Tensor fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s) {
  check_inputs(a, a_s, b, b_s);
  const DeviceCall call(kOp, "a", a);

  const int64_t rows = a.size(0), width = b.size(0);
  Tensor out = empty({rows, width}, ScalarType::BFloat16, call.index);
  if (out.numel() == 0) return out;
  if (a.size(1) == 0) return zero_(out);
  if (rows > kMaxRows && width % kLibraryWidthMultiple == 0) return multiply_many_rows(a, a_s, b, b_s);
  Params params{
      .a = static_cast<const char*>(a.data_ptr()),
      .b = b.data_ptr(),
      .a_scales = static_cast<const float*>(a_s.data_ptr()),
      .b_scales = static_cast<const float*>(b_s.data_ptr()),
      .out = static_cast<char*>(out.data_ptr()),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .a_scales_stride_row = a_s.stride(0),
      .a_scales_stride_block = a_s.stride(1),
      .b_scales_stride_row = b_s.stride(0),
      .b_scales_stride_block = b_s.stride(1),
      .width = static_cast<int>(width),
      .columns = static_cast<int>(a.size(1)),
      .device = call.index,
      .num_sms = call.num_sms,
  };
  for (int64_t first = 0; first < rows; first += kMaxRows) {
    params.rows = static_cast<int>(std::min<int64_t>(kMaxRows, rows - first));
    call.check(launch(params, call.stream()));
    params.a += kMaxRows * params.a_stride, params.a_scales += kMaxRows * params.a_scales_stride_row;
    params.out += kMaxRows * width * 2;
  }
  return out;
}

}  // namespace
}  // namespace dsa::fp8_gemm

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("fp8_gemm", TORCH_BOX(&dsa::fp8_gemm::fp8_gemm)); }
