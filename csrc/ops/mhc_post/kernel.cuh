// out_i = sum_j M_ij x_j + h_post_i y, M from h_res by Sinkhorn's rounds, and the gradients of that.
//
// A CTA has a token. Its first lanes hold a weight each, and do the rounds in logarithms by shuffles, while the other
// warps wait for their first loads. docs/mhc.md has the maths.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_post {

using namespace dsa::sm90;

inline constexpr int kThreads = 256;

struct alignas(16) Piece {
  uint32_t pairs[4];
};

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Over a row (lanes of the same i), or over a column. Lane i * kStreams + j has weight i, j.
template <int kStreams>
__device__ __forceinline__ float sum_over(float value, bool columns) {
#pragma unroll
  for (int lanes = 1; lanes < kStreams; lanes *= 2) {
    value += __shfl_xor_sync(~0u, value, columns ? lanes * kStreams : lanes);
  }
  return value;
}

template <int kStreams>
__device__ __forceinline__ float largest_over(float value, bool columns) {
#pragma unroll
  for (int lanes = 1; lanes < kStreams; lanes *= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, columns ? lanes * kStreams : lanes));
  }
  return value;
}

// Logarithms behind one step.
template <int kStreams>
__device__ __forceinline__ float normalise(float logarithm, bool columns) {
  const float largest = largest_over<kStreams>(logarithm, columns);
  return logarithm - largest - __logf(sum_over<kStreams>(__expf(logarithm - largest), columns));
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads) mhc_post_fwd_kernel(const __grid_constant__ Params p) {
  constexpr int kWeights = kStreams * kStreams;
  __shared__ float mixing[kStreams][kStreams], h_post[kStreams];
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x;
  if (threadIdx.x < kWarpThreads) {
    float logarithm = p.h_res[token * kWeights + lane % kWeights];
    for (int i = 0; i < p.iterations; ++i) {
      logarithm = normalise<kStreams>(logarithm, true);
      logarithm = normalise<kStreams>(logarithm, false);
    }
    if (lane < kWeights) mixing[lane / kStreams][lane % kStreams] = __expf(logarithm);
    if (lane < kStreams) h_post[lane] = p.h_post[token * kStreams + lane];
  }
  __syncthreads();
  const int pieces = p.columns / 8;
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
  auto* g_out = static_cast<Piece*>(p.out) + token * kStreams * pieces;
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
    Piece x[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = g_x[j * pieces + piece];
    const Piece y = g_y[piece];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      Piece out;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 layer = unpack(y.pairs[c]);
        float2 sum{h_post[i] * layer.x, h_post[i] * layer.y};
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          const float2 stream = unpack(x[j].pairs[c]);
          sum.x = fmaf(mixing[i][j], stream.x, sum.x), sum.y = fmaf(mixing[i][j], stream.y, sum.y);
        }
        out.pairs[c] = pack_bf16(sum.x, sum.y);
      }
      g_out[i * pieces + piece] = out;
    }
  }
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads) mhc_post_bwd_kernel(const __grid_constant__ Params p) {
  constexpr int kWeights = kStreams * kStreams, kSums = kWeights + kStreams, kWarps = kThreads / kWarpThreads;
  __shared__ float mixing[kStreams][kStreams], h_post[kStreams], sums[kWarps][kSums];
  __shared__ float steps[2 * kMaxIterations][kWeights];
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  if (warp == 0) {
    float logarithm = p.h_res[token * kWeights + lane % kWeights];
    for (int step = 0; step < 2 * p.iterations; ++step) {
      logarithm = normalise<kStreams>(logarithm, step % 2 == 0);
      if (lane < kWeights) steps[step][lane] = logarithm;
    }
    if (lane < kWeights) mixing[lane / kStreams][lane % kStreams] = __expf(logarithm);
    if (lane < kStreams) h_post[lane] = p.h_post[token * kStreams + lane];
  }
  __syncthreads();
  const int pieces = p.columns / 8;
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_dout = static_cast<const Piece*>(p.dout) + token * kStreams * pieces;
  const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
  auto* g_dx = static_cast<Piece*>(p.out) + token * kStreams * pieces;
  auto* g_dy = static_cast<Piece*>(p.dy) + token * pieces;
  float products[kSums] = {};  // of dout_i with x_j, then with y
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
    Piece x[kStreams], dout[kStreams], dx[kStreams], dy;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = g_x[j * pieces + piece], dout[j] = g_dout[j * pieces + piece];
    const Piece y = g_y[piece];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float2 upstream[kStreams], of_y{};
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        upstream[i] = unpack(dout[i].pairs[c]);
        of_y.x = fmaf(h_post[i], upstream[i].x, of_y.x), of_y.y = fmaf(h_post[i], upstream[i].y, of_y.y);
        const float2 layer = unpack(y.pairs[c]);
        products[kWeights + i] += upstream[i].x * layer.x + upstream[i].y * layer.y;
      }
      dy.pairs[c] = pack_bf16(of_y.x, of_y.y);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float2 stream = unpack(x[j].pairs[c]);
        float2 of_x{};
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          of_x.x = fmaf(mixing[i][j], upstream[i].x, of_x.x), of_x.y = fmaf(mixing[i][j], upstream[i].y, of_x.y);
          products[i * kStreams + j] += upstream[i].x * stream.x + upstream[i].y * stream.y;
        }
        dx[j].pairs[c] = pack_bf16(of_x.x, of_x.y);
      }
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) g_dx[j * pieces + piece] = dx[j];
    g_dy[piece] = dy;
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) {
      products[i] += __shfl_xor_sync(~0u, products[i], lanes);
    }
    if (lane == 0) sums[warp][i] = products[i];
  }
  __syncthreads();
  if (warp > 0) return;
  float sum = 0.f;  // what lane i has: product i
  for (int from = 0; from < kWarps; ++from) {
    if (lane < kSums) sum += sums[from][lane];
  }
  if (lane >= kWeights && lane < kSums) p.dh_post[token * kStreams + lane - kWeights] = sum;
  // Every group of kWeights lanes has all weights, so that shuffles find them.
  sum = __shfl_sync(~0u, sum, lane % kWeights) * mixing[lane % kWeights / kStreams][lane % kStreams];
  for (int step = 2 * p.iterations - 1; step >= 0; --step) {
    sum -= __expf(steps[step][lane % kWeights]) * sum_over<kStreams>(sum, step % 2 == 0);
  }
  if (lane < kWeights) p.dh_res[token * kWeights + lane] = sum;
}

}  // namespace dsa::mhc_post
