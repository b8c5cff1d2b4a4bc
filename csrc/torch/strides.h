// The memory layout of a tensor that is allocated like another. Does not include torch, so that it is tested without
// it.
#pragma once

#include <cstdint>
#include <utility>

namespace dsa {

// The strides that torch.empty_like gives, except in dimensions of size 1: dense, with the dimensions in the order of
// `strides`. An expanded dimension (stride 0) has no place in that order and keeps its position.
inline void dense_strides(int dims, const int64_t* sizes, const int64_t* strides, int64_t* result) {
  constexpr int kMaxDims = 8;
  int order[kMaxDims];  // innermost dimension first
  for (int i = 0; i < dims; ++i) order[i] = dims - 1 - i;
  const auto is_outside = [&](int a, int b) {
    return strides[a] > strides[b] || (strides[a] == strides[b] && sizes[a] > sizes[b]);
  };
  // An insertion sort that skips dimensions of stride 0, as TensorIterator does.
  for (int i = 1; i < dims; ++i) {
    for (int at = i, before = i - 1; before >= 0; --before) {
      if (strides[order[at]] == 0 || strides[order[before]] == 0) continue;
      if (is_outside(order[before], order[at])) {
        std::swap(order[before], order[at]);
        at = before;
      } else if (strides[order[before]] < strides[order[at]]) {
        break;
      }
    }
  }
  int64_t stride = 1;
  for (int i = 0; i < dims; ++i) {
    result[order[i]] = stride;
    if (sizes[order[i]] > 1) stride *= sizes[order[i]];
  }
}

// The same for results that kernels write by rows of the last dimension, in which `strides` has stride 1. Contiguous if
// the position of an expanded dimension, or of one of size 1 (its stride means nothing), would make rows non-dense.
inline void dense_row_strides(int dims, const int64_t* sizes, const int64_t* strides, int64_t* result) {
  dense_strides(dims, sizes, strides, result);
  if (result[dims - 1] == 1) return;
  int64_t stride = 1;
  for (int i = dims - 1; i >= 0; --i) {
    result[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
}

}  // namespace dsa
