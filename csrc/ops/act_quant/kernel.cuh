// y = e4m3(x / s), s = max(amax of 128 columns, 1e-4) / 448. docs/fp8.md has the definition.
//
// A warp has a part of a row, and a lane 16 bytes of each of kPieces runs of it, all of which are under way before the
// first is used. A block's lanes find its largest magnitude by shuffles. Scales of a CTA's rows go by way of shared
// memory, since those of one column of blocks are neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::act_quant {

using sm90::kWarpThreads, sm90::Piece;

inline constexpr int kRows = 8, kThreads = kRows * kWarpThreads;  // a warp a row
inline constexpr int kPieces = 4;
inline constexpr float kSmallest = 1e-4f, kLargest = 448.f;

// How a CTA's part of its rows is cut.
template <class Input>
struct Shape {
  static constexpr int kElements = 16 / sizeof(Input);  // of a piece
  static constexpr int kLanes = kBlock / kElements;     // that share a block
  static constexpr int kColumns = kPieces * kWarpThreads * kElements;
  static constexpr int kBlocks = kColumns / kBlock;
};

__device__ __forceinline__ void to_floats(const Piece& piece, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = sm90::unpack_bf16(piece.words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void to_floats(const Piece& piece, float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(piece.words[i]);
}

// The largest magnitude, as bits, which order as magnitudes do, and NaN is the largest.
template <int kElements>
__device__ __forceinline__ uint32_t largest_of(const Piece& piece) {
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t word : piece.words) {
    largest = kElements == 8 ? __vmaxu2(largest, word & 0x7fff7fffu) : max(largest, word & 0x7fffffffu);
  }
  return kElements == 8 ? max(largest << 16, largest & 0xffff0000u) : largest;
}

// a / b as it is rounded, with r = 1 / b rounded (Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor"): a fraction of the instructions of a division. For finite a and b; the sign of a zero too.
__device__ __forceinline__ float divide(float a, float b, float r) {
  const float quotient = a * r;
  return fmaf(-fmaf(quotient, b, -a), r, quotient);
}

__device__ __forceinline__ float scale_of(uint32_t largest, bool round_scale) {
  const float bounded = __uint_as_float(max(largest, __float_as_uint(kSmallest)));
  if (!isfinite(bounded)) return bounded;
  const float scale = divide(bounded, kLargest, 1.f / kLargest);
  return round_scale ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u) : scale;  // up
}

template <class Input>
__global__ void __launch_bounds__(kThreads) act_quant_kernel(const __grid_constant__ Params p) {
  using Cta = Shape<Input>;
  constexpr int kElements = Cta::kElements, kLanes = Cta::kLanes;
  __shared__ float scales[Cta::kBlocks][kRows];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const auto tiles = static_cast<unsigned>((p.columns - 1) / Cta::kColumns + 1);  // of a row
  const int64_t first_row = int64_t{blockIdx.x / tiles} * kRows,
                first_column = int64_t{blockIdx.x % tiles} * Cta::kColumns;
  const int64_t row = first_row + warp;
  const auto column = [&](int i) { return first_column + (i * kWarpThreads + lane) * kElements; };
  const auto exists = [&](int i) { return row < p.rows && column(i) < p.columns; };

  const auto* g_row = static_cast<const Input*>(p.x) + row * p.row_stride;
  Piece pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    pieces[i] = exists(i) ? *reinterpret_cast<const Piece*>(g_row + column(i)) : Piece{};
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float values[kElements];
    to_floats(pieces[i], values);
    uint32_t largest = largest_of<kElements>(pieces[i]);
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    const float scale = scale_of(largest, p.round_scale);
    if (lane % kLanes == 0) scales[i * (kWarpThreads / kLanes) + lane / kLanes][warp] = scale;
    if (!exists(i)) continue;
    if (isfinite(scale)) {
      const float reciprocal = __frcp_rn(scale);
#pragma unroll
      for (float& value : values) value = divide(value, scale, reciprocal);
    } else {  // what is finite is zero, and the rest is NaN
#pragma unroll
      for (float& value : values) value = __fdiv_rn(value, scale);
    }
    __nv_fp8x2_storage_t pairs[kElements / 2];
#pragma unroll
    for (int j = 0; j < kElements; j += 2) {
      pairs[j / 2] = __nv_cvt_float2_to_fp8x2({values[j], values[j + 1]}, __NV_SATFINITE, __NV_E4M3);
    }
    char* g_y = static_cast<char*>(p.y) + row * p.columns + column(i);
    if constexpr (kElements == 8) {
      *reinterpret_cast<uint2*>(g_y) = *reinterpret_cast<const uint2*>(pairs);
    } else {
      *reinterpret_cast<uint32_t*>(g_y) = *reinterpret_cast<const uint32_t*>(pairs);
    }
  }
  __syncthreads();
  const int64_t block = first_column / kBlock + threadIdx.x / kRows, scaled_row = first_row + threadIdx.x % kRows;
  if (threadIdx.x < Cta::kBlocks * kRows && block < p.columns / kBlock && scaled_row < p.rows) {
    p.scales[block * p.rows + scaled_row] = scales[threadIdx.x / kRows][threadIdx.x % kRows];
  }
}

}  // namespace dsa::act_quant
