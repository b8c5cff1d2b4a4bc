// dsa::_fp8_gemm_few_rows on CUDA: argument checks, allocation, launch. docs/fp8.md has the maths.
#include <cstdint>

#include "ops/fp8_gemm/params.h"
#include "torch/abi.h"

namespace dsa::fp8_gemm {
namespace {

constexpr char kOp[] = "dsa::fp8_gemm";

Tensor fp8_gemm_few_rows(Tensor a, Tensor a_s, Tensor b, Tensor b_s) {
  check_tensor(kOp, "a", a, ScalarType::Float8_e4m3fn, {{"M"}, {"K"}});
  const int64_t rows = a.size(0), columns = a.size(1);
  DSA_CHECK(columns % kBlock == 0, kOp, ": a's columns must be a multiple of 128, got ", describe(a));
  DSA_CHECK(rows <= kMaxRows, kOp, ": a must have at most 64 rows, got ", rows);
  check_tensor(kOp, "b", b, ScalarType::Float8_e4m3fn, {{"N"}, {"K", columns}});
  const int64_t width = b.size(0), blocks = columns / kBlock;
  check_tensor(kOp, "a_s", a_s, ScalarType::Float, {{"M", rows}, {"Kb", blocks}});
  check_tensor(kOp, "b_s", b_s, ScalarType::Float, {{"Nb", (width + kBlock - 1) / kBlock}, {"Kb", blocks}});
  check_rows_aligned(kOp, "a", a);
  check_rows_aligned(kOp, "b", b);
  check_same_device(kOp, "a_s", a_s, "a", a);
  check_same_device(kOp, "b", b, "a", a);
  check_same_device(kOp, "b_s", b_s, "a", a);
  const Device device = hopper_device(kOp, "a", a);
  const int device_index = a.get_device_index();
  const DeviceGuard guard(device_index);

  Tensor out = empty({rows, width}, ScalarType::BFloat16, device_index);
  if (out.numel() == 0) return out;
  const Params params{
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .a_scales = static_cast<const float*>(a_s.data_ptr()),
      .b_scales = static_cast<const float*>(b_s.data_ptr()),
      .out = out.data_ptr(),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .a_scales_stride_row = a_s.stride(0),
      .a_scales_stride_block = a_s.stride(1),
      .b_scales_stride_row = b_s.stride(0),
      .b_scales_stride_block = b_s.stride(1),
      .rows = static_cast<int>(rows),
      .width = static_cast<int>(width),
      .columns = static_cast<int>(columns),
      .device = device_index,
      .num_sms = device.num_sms,
  };
  const char* error = launch(params, current_stream(device_index));
  DSA_CHECK(error == nullptr, kOp, ": launch failed: ", error);
  return out;
}

}  // namespace
}  // namespace dsa::fp8_gemm

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("_fp8_gemm_few_rows", TORCH_BOX(&dsa::fp8_gemm::fp8_gemm_few_rows)); }
