// out = s fine + (1 - s) coarse, s = sigmoid(gate) of a row, and its gradients.
//
// No warp specialization: a thread has 16 bytes of each of kRowsPerThread rows, all loads issued before the first is
// used.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"

namespace dsa::gated_fusion {

inline constexpr int kThreads = 256, kRowsPerThread = 2;

// 16 bytes of a row: columns in pairs.
struct alignas(16) Piece {
  uint32_t pairs[4];
};

// How a CTA is divided.
template <int kColumns>
struct Shape {
  static constexpr int kPieces = kColumns / 8;            // per row
  static constexpr int kRowsAtOnce = kThreads / kPieces;  // per CTA
  static constexpr int kRows = kRowsAtOnce * kRowsPerThread;
};

struct Place {
  int batch, head, position;

  __device__ __forceinline__ Place(const Inputs& in, unsigned row)
      : batch(row / in.positions / in.heads), head(row / in.positions % in.heads), position(row % in.positions) {}

  template <class T>
  __device__ __forceinline__ T& in(const Heads& rows) const {
    return static_cast<T*>(rows.data)[rows.offset(batch, head, position)];
  }

  __device__ __forceinline__ Piece& piece(const Heads& rows, int index) const {
    return reinterpret_cast<Piece*>(&in<__nv_bfloat16>(rows))[index];
  }
};

// The rows of this thread. Rows after the last one are clamped to it.
template <int kColumns>
__device__ __forceinline__ Place place_of(const Inputs& in, int i) {
  using Cta = Shape<kColumns>;
  const unsigned row = blockIdx.x * Cta::kRows + i * Cta::kRowsAtOnce + threadIdx.x / Cta::kPieces;
  return {in, min(row, in.rows - 1)};
}

// s and 1 - s, both to full precision.
struct Shares {
  float fine, coarse;

  __device__ __forceinline__ explicit Shares(float gate) {
    const float e = __expf(-fabsf(gate)), larger = 1.f / (1.f + e), smaller = e * larger;
    fine = gate >= 0.f ? larger : smaller;
    coarse = gate >= 0.f ? smaller : larger;
  }
};

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <int kColumns, class Gate>
__global__ void __launch_bounds__(kThreads) gated_fusion_fwd_kernel(const __grid_constant__ Forward p) {
  const int index = threadIdx.x % Shape<kColumns>::kPieces;
  Piece fine[kRowsPerThread], coarse[kRowsPerThread];
  float gate[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const Place place = place_of<kColumns>(p.in, i);
    fine[i] = place.piece(p.in.fine, index);
    coarse[i] = place.piece(p.in.coarse, index);
    gate[i] = static_cast<float>(place.in<Gate>(p.in.gate));
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const Shares s(gate[i]);
    Piece out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t f = fine[i].pairs[j], c = coarse[i].pairs[j];
      out.pairs[j] = sm90::pack_bf16(s.fine * low(f) + s.coarse * low(c), s.fine * high(f) + s.coarse * high(c));
    }
    place_of<kColumns>(p.in, i).piece(p.out, index) = out;
  }
}

// dfine = s dout, dcoarse = (1 - s) dout, dgate = s (1 - s) sum dout (fine - coarse).
template <int kColumns, class Gate>
__global__ void __launch_bounds__(kThreads) gated_fusion_bwd_kernel(const __grid_constant__ Backward p) {
  const int index = threadIdx.x % Shape<kColumns>::kPieces;
  Piece dout[kRowsPerThread], fine[kRowsPerThread], coarse[kRowsPerThread];
  float gate[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const Place place = place_of<kColumns>(p.in, i);
    dout[i] = place.piece(p.dout, index);
    fine[i] = place.piece(p.in.fine, index);
    coarse[i] = place.piece(p.in.coarse, index);
    gate[i] = static_cast<float>(place.in<Gate>(p.in.gate));
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const Shares s(gate[i]);
    Piece dfine, dcoarse;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t d = dout[i].pairs[j], f = fine[i].pairs[j], c = coarse[i].pairs[j];
      dfine.pairs[j] = sm90::pack_bf16(s.fine * low(d), s.fine * high(d));
      dcoarse.pairs[j] = sm90::pack_bf16(s.coarse * low(d), s.coarse * high(d));
      sum += low(d) * (low(f) - low(c)) + high(d) * (high(f) - high(c));
    }
#pragma unroll
    for (int lanes = Shape<kColumns>::kPieces / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const Place place = place_of<kColumns>(p.in, i);
    place.piece(p.dfine, index) = dfine;
    place.piece(p.dcoarse, index) = dcoarse;
    if (index == 0) place.in<Gate>(p.dgate) = static_cast<Gate>(s.fine * s.coarse * sum);
  }
}

}  // namespace dsa::gated_fusion
