// dsa::act_quant on CUDA: argument checks, allocation, launch. Definition: docs/fp8/act_quant.md.
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "ops/fp8/act_quant/params.h"
#include "torch/abi.h"

namespace dsa::act_quant {
namespace {

constexpr char kOp[] = "dsa::act_quant";

// How many rows of x are one row of the kernel, whose warps take up to 1024 columns of a row: several if rows are
// contiguous and have one block each, since then their scales are contiguous too.
int64_t rows_per_kernel_row(const Tensor& rows) {
  constexpr int64_t kMost = 8;
  if (rows.size(1) != kBlock || rows.stride(0) != kBlock) return 1;
  return std::gcd(rows.size(0), kMost);
}

void check_inputs(const Tensor& x, int64_t block) {
  const bool is_float = x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Float;
  DSA_CHECK(is_float && x.dim() >= 1 && x.size(x.dim() - 1) % kBlock == 0, kOp,
            ": x must be bfloat16 or float32 [.., N] with N a multiple of 128, got ", describe(x));
  DSA_CHECK(block == kBlock, kOp, ": block must be 128, got ", block);
}

std::tuple<Tensor, Tensor> act_quant(Tensor x, int64_t block, bool round_scale) {
  check_inputs(x, block);
  const DeviceCall call(kOp, "x", x);

  const int64_t columns = x.size(x.dim() - 1), blocks = columns / kBlock;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  int64_t count = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) count *= sizes[dim];
  Tensor y = empty({count, columns}, ScalarType::Float8_e4m3fn, call.index);
  Tensor scales = empty({blocks, count}, ScalarType::Float, call.index);
  if (y.numel() > 0) {
    const Tensor rows = as_aligned_rows(x, count);
    const int64_t together = rows_per_kernel_row(rows);
    const Params params{
        .x = rows.data_ptr(),
        .y = y.data_ptr(),
        .scales = static_cast<float*>(scales.data_ptr()),
        .scales_block_stride = together > 1 ? 1 : count,
        .scales_row_stride = together,
        .row_stride = rows.stride(0) * together,
        .rows = count / together,
        .columns = columns * together,
        .device = call.index,
        .is_bf16 = x.scalar_type() == ScalarType::BFloat16,
        .round_scale = round_scale,
    };
    call.check(launch(params, call.stream()));
  }
  y = view(y, sizes);
  sizes.pop_back();
  sizes.insert(sizes.begin(), blocks);
  scales = view(scales, sizes);
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) scales = transpose(scales, dim, dim + 1);
  return {y, scales};
}

}  // namespace
}  // namespace dsa::act_quant

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("act_quant", TORCH_BOX(&dsa::act_quant::act_quant)); }
