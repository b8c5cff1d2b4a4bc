// dsa::pack_kv_fp8 on CUDA: argument checks, allocation, launch. Layout: docs/sparse_mla/pack_kv_fp8.md.
#include <cstdint>
#include <vector>

#include "ops/sparse_mla/pack_kv_fp8/params.h"
#include "ops/sparse_mla/packed_keys.h"
#include "torch/abi.h"

namespace dsa::pack_kv_fp8 {
namespace {

constexpr char kOp[] = "dsa::pack_kv_fp8";

Tensor pack_kv_fp8(Tensor kv) {
  const int64_t last = kv.dim() - 1, d_qk = last < 0 ? 0 : kv.size(last);
  DSA_CHECK(kv.scalar_type() == ScalarType::BFloat16 && (d_qk == 576 || d_qk == 512), kOp,
            ": kv must be bfloat16 [.., D] with D 576 or 512, got ", describe(kv));
  const DeviceCall call(kOp, "kv", kv);

  std::vector<int64_t> sizes(kv.sizes().begin(), kv.sizes().end());
  int64_t rows = 1;
  for (int64_t dim = 0; dim < last; ++dim) rows *= sizes[dim];
  sizes[last] = sparse_mla::packed_bytes(static_cast<int>(d_qk));
  Tensor packed = empty({rows, sizes[last]}, ScalarType::Byte, call.index);
  if (rows > 0) {
    const Tensor matrix = as_aligned_rows(kv, rows);
    const Params params{
        .kv = matrix.data_ptr(),
        .packed = packed.data_ptr(),
        .row_stride = matrix.stride(0),
        .rows = rows,
        .d_qk = static_cast<int>(d_qk),
        .device = call.index,
    };
    call.check(launch(params, call.stream()));
  }
  return view(packed, sizes);
}

}  // namespace
}  // namespace dsa::pack_kv_fp8

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("pack_kv_fp8", TORCH_BOX(&dsa::pack_kv_fp8::pack_kv_fp8)); }
