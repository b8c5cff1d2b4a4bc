// Packs keys in fp8. Layout: docs/sparse_mla/pack_kv_fp8.md.
//
// A warp packs one key. Each lane quantizes 16 columns; the eight lanes of a block of 128 columns find its largest
// magnitude by shuffles. The first lanes copy the rope part.
// Programmatic dependent launch (PDL): waits for the preceding kernel before the first load.
#pragma once

#include <cstdint>

#include "ops/shared/quantization/quantize.cuh"
#include "ops/sparse_mla/packed_keys.h"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::pack_kv_fp8 {

using namespace dsa::sparse_mla;
using sm90::kWarpThreads, sm90::Piece;

inline constexpr int kRows = 8, kThreads = kRows * kWarpThreads;                // one warp per key
inline constexpr int kPieces = 2;                                               // per lane, of 8 columns
inline constexpr int kLanes = kScaleColumns / (kPieces * sm90::kPieceColumns);  // that share a scale

template <int kColumns>
__global__ void __launch_bounds__(kThreads) pack_kv_fp8_kernel(const __grid_constant__ Params p) {
  constexpr int kRopePieces = (kColumns - kPackedColumns) / sm90::kPieceColumns;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kWarpThreads;
  sm90::launch_dependents();
  if (row >= p.rows) return;
  const auto* g_pieces =
      reinterpret_cast<const Piece*>(static_cast<const char*>(p.kv) + row * p.row_stride * int64_t{2});
  constexpr int kRowBytes = packed_bytes(kColumns);
  char* g_packed = static_cast<char*>(p.packed) + row * kRowBytes;

  sm90::wait_for_preceding_kernel();
  Piece pieces[kPieces], rope{};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = g_pieces[lane * kPieces + i];
  if (lane < kRopePieces) rope = g_pieces[kPackedColumns / sm90::kPieceColumns + lane];

  uint32_t largest = 0;
#pragma unroll
  for (const Piece& piece : pieces) largest = max(largest, quantization::largest_of<sm90::kPieceColumns>(piece));
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  const float scale = quantization::scale_of(largest, false);
  alignas(16) __nv_fp8x2_storage_t pairs[kPieces][sm90::kPieceColumns / 2];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) quantization::quantize(pieces[i], scale, pairs[i]);
  reinterpret_cast<uint4*>(g_packed)[lane] = *reinterpret_cast<const uint4*>(pairs);
  if (lane % kLanes == 0) reinterpret_cast<float*>(g_packed + kPackedColumns)[lane / kLanes] = scale;
  if (lane < kRopePieces) reinterpret_cast<Piece*>(g_packed + kPackedColumns + kScaleBytes)[lane] = rope;
}

}  // namespace dsa::pack_kv_fp8
