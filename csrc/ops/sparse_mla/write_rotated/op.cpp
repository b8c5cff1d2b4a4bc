// dsa::_write_rotated: RoPE of the modules in dsa_ext.nn, which check layouts before (dsa_ext/nn/rotary.py).
#include <cstdint>

#include "ops/sparse_mla/write_rotated/params.h"
#include "torch/abi.h"

namespace dsa::write_rotated {
namespace {

constexpr char kOp[] = "dsa::_write_rotated";

// [batch, positions, heads, columns]; bf16, rows that start at a multiple of so many elements.
Rows rows_of(const char* name, const Tensor& tensor, const Tensor& like, int64_t columns, int multiple) {
  check_tensor(kOp, name, tensor, ScalarType::BFloat16,
               {{"B", like.size(0)}, {"S", like.size(1)}, {"H", like.size(2)}, {"D", columns}});
  check_same_device(kOp, name, tensor, "x", like);
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  bool fits = tensor.stride(3) == 1 && address % (2 * multiple) == 0;
  for (int dim = 0; dim < 3; ++dim) fits &= tensor.size(dim) == 1 || tensor.stride(dim) % multiple == 0;
  DSA_CHECK(fits || tensor.numel() == 0, kOp, ": ", name, " must have dense rows that start ", 2 * multiple,
            "-byte aligned");
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void write_rotated(Tensor out, Tensor x, Tensor cos, Tensor sin, int64_t first, bool interleaved,
                   bool interleaved_out) {
  DSA_CHECK(x.dim() == 4 && cos.dim() == 4, kOp, ": x and cos must be [B, S, H, D], got ", describe(x), " and ",
            describe(cos));
  const int64_t columns = x.size(3), pairs = cos.size(3);
  DSA_CHECK(pairs % 4 == 0 && columns % 8 == 0 && 2 * pairs <= columns, kOp,
            ": cos must have a multiple of 4 columns, at most half of those of x, which must be a multiple of 8, got ",
            describe(cos), " with x ", describe(x));
  DSA_CHECK(first % 8 == 0 && 0 <= first && first <= columns - 2 * pairs, kOp,
            ": first must be a multiple of 8, from 0 to ", columns - 2 * pairs, ", got ", first);
  DSA_CHECK(x.numel() / 4 <= INT32_MAX, kOp, ": x must have fewer than 2^33 elements, got ", describe(x));
  const Params params{
      .out = rows_of("out", out, x, columns, 8),
      .x = rows_of("x", x, x, columns, 8),
      .cos = rows_of("cos", cos, x, pairs, 4),
      .sin = rows_of("sin", sin, x, pairs, 4),
      .rows = columns > 0 ? x.numel() / columns : 0,
      .positions = static_cast<int>(x.size(1)),
      .heads = static_cast<int>(x.size(2)),
      .columns = static_cast<int>(columns),
      .first = static_cast<int>(first),
      .pairs = static_cast<int>(pairs),
      .interleaved = interleaved,
      .interleaved_out = interleaved_out,
      .device = x.get_device_index(),
  };
  const DeviceCall call(kOp, "x", x);
  if (params.rows > 0) call.check(launch(params, call.stream()));
}

}  // namespace
}  // namespace dsa::write_rotated

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("_write_rotated", TORCH_BOX(&dsa::write_rotated::write_rotated)); }
