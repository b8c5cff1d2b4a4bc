// Host side of TMA: tensor maps over [batch, position, group, head, column] tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "launch.h"

namespace dsa::sm90 {

struct HeadTensor {
  const void* data;
  int columns, heads, groups, positions, batch;                      // `heads` per group
  int64_t stride_head, stride_group, stride_position, stride_batch;  // in elements
};

// The box that one copy moves. Its `columns` span the swizzle width, 128 or 64 bytes.
struct HeadBox {
  int columns = 64, heads = 64, positions = 1;
  int element_bytes = 2;  // 2: bf16; 1: any
  // The L2 promotion size of a row of the box.
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

// Returns false when the driver refuses.
inline bool encode_head_tensor(CUtensorMap* map, const HeadTensor& t, const HeadBox& box = {}) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return false;
  const cuuint64_t sizes[5] = {cuuint64_t(t.columns), cuuint64_t(t.heads), cuuint64_t(t.groups),
                               cuuint64_t(t.positions), cuuint64_t(t.batch)};
  // The stride of a dimension of size 1 is never used, and torch leaves it arbitrary.
  const auto bytes = [&](int size, int64_t stride) { return cuuint64_t(size == 1 ? 16 : stride * box.element_bytes); };
  const cuuint64_t strides[4] = {bytes(t.heads, t.stride_head), bytes(t.groups, t.stride_group),
                                 bytes(t.positions, t.stride_position), bytes(t.batch, t.stride_batch)};
  const cuuint32_t box_sizes[5] = {cuuint32_t(box.columns), cuuint32_t(box.heads), 1, cuuint32_t(box.positions), 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  return encode(map, box.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 5,
                const_cast<void*>(t.data), sizes, strides, box_sizes, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                box.columns * box.element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                box.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dsa::sm90
