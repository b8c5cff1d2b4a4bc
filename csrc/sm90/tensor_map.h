// Host side of TMA: tensor maps over [batch, position, group, head, column] bf16 tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "launch.h"

namespace dsa::sm90 {

struct HeadTensor {
  const void* data;
  int columns, heads, groups, positions, batch;                      // `heads` of one group
  int64_t stride_head, stride_group, stride_position, stride_batch;  // in elements
};

// A map that moves 64 heads x 64 columns a copy, in the 128-byte swizzle. False when the driver refuses.
inline bool encode_head_tensor(CUtensorMap* map, const HeadTensor& t) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return false;
  const cuuint64_t sizes[5] = {cuuint64_t(t.columns), cuuint64_t(t.heads), cuuint64_t(t.groups),
                               cuuint64_t(t.positions), cuuint64_t(t.batch)};
  // The stride of a dimension of size one is never used, and may be anything in a torch tensor.
  const auto bytes = [](int size, int64_t stride) { return cuuint64_t(size == 1 ? 16 : stride * 2); };
  const cuuint64_t strides[4] = {bytes(t.heads, t.stride_head), bytes(t.groups, t.stride_group),
                                 bytes(t.positions, t.stride_position), bytes(t.batch, t.stride_batch)};
  const cuuint32_t box[5] = {64, 64, 1, 1, 1}, element_strides[5] = {1, 1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(t.data), sizes, strides, box,
                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dsa::sm90
