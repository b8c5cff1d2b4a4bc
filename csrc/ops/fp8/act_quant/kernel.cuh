// y = e4m3(x / s), s = max(amax of 128 columns, 1e-4) / 448. Definition: docs/fp8/act_quant.md.
//
// No warp specialization: a warp quantizes a part of one row. Each lane loads 16 bytes of each of kPieces runs of it,
// all issued before the first is used. The lanes of a block find its largest magnitude by shuffles. The scales of a
// CTA's rows are stored through shared memory, because those of one column of blocks are adjacent in global memory.
// Contiguous rows of one block come here as rows of up to eight blocks (op.cpp).
// Programmatic dependent launch (PDL): waits for the preceding kernel before the first load.
#pragma once

#include <cuda_bf16.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "ops/shared/quantization/quantize.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::act_quant {

using namespace dsa::quantization;
using sm90::kWarpThreads, sm90::Piece;

inline constexpr int kRows = 16, kThreads = kRows * kWarpThreads;  // one warp per row
inline constexpr int kPieces = 4;

// How a CTA's part of its rows is divided.
template <class Input>
struct Shape {
  static constexpr int kElements = 16 / sizeof(Input);  // per piece
  static constexpr int kLanes = kBlock / kElements;     // that share a block
  static constexpr int kColumns = kPieces * kWarpThreads * kElements;
  static constexpr int kBlocks = kColumns / kBlock;
};

template <class Input>
__global__ void __launch_bounds__(kThreads)
    act_quant_kernel(const __grid_constant__ Params p, const __grid_constant__ cutlass::FastDivmod tiles_of_row) {
  using Cta = Shape<Input>;
  constexpr int kElements = Cta::kElements, kLanes = Cta::kLanes;
  __shared__ float scales[Cta::kBlocks][kRows];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  int row_tile, column_tile;
  tiles_of_row(row_tile, column_tile, static_cast<int>(blockIdx.x));
  const int64_t first_row = int64_t{row_tile} * kRows, row = first_row + warp,
                first_column = int64_t{column_tile} * Cta::kColumns;
  const int width = row < p.rows ? static_cast<int>(min(p.columns - first_column, int64_t{Cta::kColumns})) : 0;
  const auto column = [&](int i) { return (i * kWarpThreads + lane) * kElements; };

  const auto* g_x = static_cast<const Input*>(p.x) + row * p.row_stride + first_column;
  sm90::launch_dependents();
  sm90::wait_for_preceding_kernel();
  Piece pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    pieces[i] = column(i) < width ? *reinterpret_cast<const Piece*>(g_x + column(i)) : Piece{};
  }
  __syncwarp();  // otherwise the compiler delays loads until the piece before has been used, to save registers
  auto* g_y = static_cast<char*>(p.y) + row * p.columns + first_column;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint32_t largest = largest_of<kElements>(pieces[i]);
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    const float scale = scale_of(largest, p.round_scale);
    if (lane % kLanes == 0) scales[i * (kWarpThreads / kLanes) + lane / kLanes][warp] = scale;
    alignas(8) __nv_fp8x2_storage_t pairs[kElements / 2];
    quantize(pieces[i], scale, pairs);
    if (column(i) >= width) continue;
    if constexpr (kElements == 8) {
      *reinterpret_cast<uint2*>(g_y + column(i)) = *reinterpret_cast<const uint2*>(pairs);
    } else {
      *reinterpret_cast<uint32_t*>(g_y + column(i)) = *reinterpret_cast<const uint32_t*>(pairs);
    }
  }
  __syncthreads();
  const int block = threadIdx.x / kRows;
  const int64_t scaled_row = first_row + threadIdx.x % kRows;
  if (block < Cta::kBlocks && first_column + block * kBlock < p.columns && scaled_row < p.rows) {
    p.scales[(first_column / kBlock + block) * p.scales_block_stride + scaled_row * p.scales_row_stride] =
        scales[block][threadIdx.x % kRows];
  }
}

}  // namespace dsa::act_quant
