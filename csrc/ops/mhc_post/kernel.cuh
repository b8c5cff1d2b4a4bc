// out_i = sum_j M_ij x_j + h_post_i y, M from h_res by Sinkhorn's rounds, and the gradients of that.
//
// A CTA has eight tokens, and each warp streams one. The rounds, which take their time one after another, are made by
// the first warp for all of them, a lane a row of weights, while the others wait for what they have loaded first.
// docs/mhc.md has the maths.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_post {

using namespace dsa::sm90;

inline constexpr int kTokens = 8, kThreads = kTokens * kWarpThreads;

// Of streams side by side: 8 columns each.
struct alignas(16) Piece {
  uint32_t pairs[4];
};

__device__ __forceinline__ Piece load(const Piece* g) {
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(g));
  return {words.x, words.y, words.z, words.w};
}

// Lanes i * kStreams .. share a token, and have a row each. Sum, or largest, over these lanes.
template <int kStreams, class Combine>
__device__ __forceinline__ float over_rows(float value, Combine&& combine) {
#pragma unroll
  for (int lanes = 1; lanes < kStreams; lanes *= 2) value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  return value;
}
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

// Rounds of Sinkhorn on a row of logarithms. `keep` gets what each step has subtracted: of the columns the lane's own,
// then of its row.
template <int kStreams, class Keep>
__device__ __forceinline__ void normalise(float (&row)[kStreams], int iterations, int lane, Keep&& keep) {
  for (int i = 0; i < iterations; ++i) {
    float subtracted = 0.f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float largest = over_rows<kStreams>(row[j], larger);
      const float of_column = largest + __logf(over_rows<kStreams>(__expf(row[j] - largest), plus));
      row[j] -= of_column;
      if (lane % kStreams == j) subtracted = of_column;
    }
    keep(2 * i, subtracted);
    float largest = row[0], sum = 0.f;
#pragma unroll
    for (int j = 1; j < kStreams; ++j) largest = fmaxf(largest, row[j]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += __expf(row[j] - largest);
    const float of_row = largest + __logf(sum);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) row[j] -= of_row;
    keep(2 * i + 1, of_row);
  }
}

// The gradients of that: of the weights' logarithms behind the last step, to those of h_res. `subtracted` returns what
// a step has subtracted, of column or row j.
template <int kStreams, class Subtracted>
__device__ __forceinline__ void normalise_bwd(float (&gradient)[kStreams], float (&row)[kStreams], int iterations,
                                              int lane, Subtracted&& subtracted) {
  for (int i = iterations - 1; i >= 0; --i) {
    float sum = 0.f;
#pragma unroll
    for (float part : gradient) sum += part;
    const float of_row = subtracted(2 * i + 1, lane % kStreams);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) gradient[j] -= __expf(row[j]) * sum, row[j] += of_row;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      gradient[j] -= __expf(row[j]) * over_rows<kStreams>(gradient[j], plus);
      row[j] += subtracted(2 * i, j);
    }
  }
}

// What the warps need of a token.
template <int kStreams>
struct Weights {
  float mixing[kTokens][kStreams][kStreams], h_post[kTokens][kStreams];
};

// The place of a lane of the first warp: a token of the CTA, a row of its weights, and whether there are such.
template <int kStreams>
struct RowOfLane {
  int token, row;
  int64_t global;  // of all rows
  bool exists;

  __device__ __forceinline__ RowOfLane(const Params& p, int lane) : token(lane / kStreams), row(lane % kStreams) {
    const int64_t first = int64_t{blockIdx.x} * kTokens;
    exists = token < kTokens && first + token < p.tokens;
    global = (first + token) * kStreams + row;
  }
};

template <int kStreams, class Keep>
__device__ __forceinline__ void make_weights(Weights<kStreams>& weights, const Params& p, int lane,
                                             float (&row)[kStreams], Keep&& keep) {
  const RowOfLane<kStreams> at(p, lane);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) row[j] = at.exists ? p.h_res[at.global * kStreams + j] : 0.f;
  const float h_post = at.exists ? p.h_post[at.global] : 0.f;
  normalise<kStreams>(row, p.iterations, lane, keep);
  if (at.token >= kTokens) return;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) weights.mixing[at.token][at.row][j] = __expf(row[j]);
  weights.h_post[at.token][at.row] = h_post;
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads, 2) mhc_post_fwd_kernel(const __grid_constant__ Params p) {
  __shared__ Weights<kStreams> weights;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, pieces = p.columns / 8;
  const int64_t token = int64_t{blockIdx.x} * kTokens + warp;
  const bool exists = token < p.tokens;
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
  auto* g_out = static_cast<Piece*>(p.out) + token * kStreams * pieces;
  Piece x[kStreams], y;
  const auto load_pieces = [&](int piece) {
    if (!exists || piece >= pieces) return;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = load(g_x + j * pieces + piece);
    y = load(g_y + piece);
  };
  load_pieces(lane);
  if (warp == 0) {
    float row[kStreams];
    make_weights(weights, p, lane, row, [](int, float) {});
  }
  __syncthreads();
  if (!exists) return;
  float mixing[kStreams][kStreams], h_post[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    h_post[i] = weights.h_post[warp][i];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) mixing[i][j] = weights.mixing[warp][i][j];
  }
  for (int piece = lane; piece < pieces; piece += kWarpThreads) {
    float2 streams[kStreams][4], layer[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      layer[c] = unpack_bf16(y.pairs[c]);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) streams[j][c] = unpack_bf16(x[j].pairs[c]);
    }
    load_pieces(piece + kWarpThreads);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      Piece out;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float2 sum{h_post[i] * layer[c].x, h_post[i] * layer[c].y};
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          sum.x = fmaf(mixing[i][j], streams[j][c].x, sum.x), sum.y = fmaf(mixing[i][j], streams[j][c].y, sum.y);
        }
        out.pairs[c] = pack_bf16(sum.x, sum.y);
      }
      g_out[i * pieces + piece] = out;
    }
  }
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads, 2) mhc_post_bwd_kernel(const __grid_constant__ Params p) {
  constexpr int kWeights = kStreams * kStreams, kSums = kWeights + kStreams;
  __shared__ Weights<kStreams> weights;
  __shared__ float subtracted[2 * kMaxIterations][kTokens * kStreams], sums[kTokens][kSums];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, pieces = p.columns / 8;
  const int64_t token = int64_t{blockIdx.x} * kTokens + warp;
  float row[kStreams];  // of the first warp
  if (warp == 0) {
    make_weights(weights, p, lane, row, [&](int step, float of_lane) {
      if (lane < kTokens * kStreams) subtracted[step][lane] = of_lane;
    });
  }
  __syncthreads();
  if (token < p.tokens) {
    const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
    const auto* g_dout = static_cast<const Piece*>(p.dout) + token * kStreams * pieces;
    const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
    auto* g_dx = static_cast<Piece*>(p.out) + token * kStreams * pieces;
    auto* g_dy = static_cast<Piece*>(p.dy) + token * pieces;
    float products[kSums] = {};  // of dout_i with x_j, then with y
    for (int piece = lane; piece < pieces; piece += kWarpThreads) {
      Piece x[kStreams], dout[kStreams], dy;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        x[j] = load(g_x + j * pieces + piece), dout[j] = load(g_dout + j * pieces + piece);
      }
      const Piece y = load(g_y + piece);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 layer = unpack_bf16(y.pairs[c]);
        float2 upstream[kStreams], of_y{};
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          upstream[i] = unpack_bf16(dout[i].pairs[c]);
          const float h_post = weights.h_post[warp][i];
          of_y.x = fmaf(h_post, upstream[i].x, of_y.x), of_y.y = fmaf(h_post, upstream[i].y, of_y.y);
          products[kWeights + i] = fmaf(upstream[i].x, layer.x, fmaf(upstream[i].y, layer.y, products[kWeights + i]));
        }
        dy.pairs[c] = pack_bf16(of_y.x, of_y.y);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          const float2 stream = unpack_bf16(x[j].pairs[c]);
          float2 of_x{};
#pragma unroll
          for (int i = 0; i < kStreams; ++i) {
            const float weight = weights.mixing[warp][i][j];
            of_x.x = fmaf(weight, upstream[i].x, of_x.x), of_x.y = fmaf(weight, upstream[i].y, of_x.y);
            float& product = products[i * kStreams + j];
            product = fmaf(upstream[i].x, stream.x, fmaf(upstream[i].y, stream.y, product));
          }
          x[j].pairs[c] = pack_bf16(of_x.x, of_x.y);
        }
      }
#pragma unroll
      for (int j = 0; j < kStreams; ++j) g_dx[j * pieces + piece] = x[j];
      g_dy[piece] = dy;
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) {
        products[i] += __shfl_xor_sync(~0u, products[i], lanes);
      }
      if (lane == 0) sums[warp][i] = products[i];
    }
  }
  __syncthreads();
  if (warp > 0) return;
  const RowOfLane<kStreams> at(p, lane);
  float gradient[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    gradient[j] = at.exists ? sums[at.token][at.row * kStreams + j] * __expf(row[j]) : 0.f;
  }
  if (at.exists) p.dh_post[at.global] = sums[at.token][kWeights + at.row];
  normalise_bwd<kStreams>(gradient, row, p.iterations, lane, [&](int step, int of) {
    return lane < kTokens * kStreams ? subtracted[step][at.token * kStreams + of] : 0.f;
  });
  if (!at.exists) return;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) p.dh_res[at.global * kStreams + j] = gradient[j];
}

}  // namespace dsa::mhc_post
