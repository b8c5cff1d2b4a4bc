// out_i = sum_j M_ij x_j + h_post_i y, with M from h_res by Sinkhorn iterations, and its gradients. Math:
// docs/mhc/mhc_post.md.
//
// No warp specialization: two kernels forward and three backward, in a chain of programmatic dependent launches (PDL).
//
//   kernel             a thread or CTA has         does                                  waits for
//   mixing             thread: a row of weights    M, by Sinkhorn iterations
//   mhc_post_fwd/_bwd  CTA: a token                streams x and y; gradients of M       mixing, after its first loads
//   mixing_bwd         thread: a row of weights    gradients of h_res, through the       mhc_post_bwd, after its own
//                                                  iterations backward                   forward iterations
//
// The iterations are sequential, so a kernel of its own takes them for all tokens at once. Meanwhile the streaming
// kernel has started to load.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_post {

using namespace dsa::sm90;

inline constexpr int kMaxThreads = 256;           // of a streaming CTA, at most
inline constexpr int kRowThreads = kWarpThreads;  // of a CTA of the mixing kernels

// Reduces over the kStreams adjacent lanes that share a token and have one row each.
template <int kStreams, class Combine>
__device__ __forceinline__ float over_rows(float value, Combine&& combine) {
#pragma unroll
  for (int lanes = 1; lanes < kStreams; lanes *= 2) value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  return value;
}
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

// Whether a sum has full precision.
__device__ __forceinline__ bool is_accurate(float sum) { return sum > 1e-30f && sum < 1e30f; }

// log2 of the sums of 2^row over the columns, or over the row. Sums whose terms are far from 1 are recomputed relative
// to their largest term: by the whole warp if any lane has such a sum, but each token keeps its own result.
template <int kStreams>
__device__ __forceinline__ void column_sums(const float (&row)[kStreams], float (&log_sums)[kStreams]) {
  bool usual = true;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float sum = over_rows<kStreams>(exp2_fast(row[j]), plus);
    usual &= is_accurate(sum), log_sums[j] = log2_fast(sum);
  }
  if (__all_sync(~0u, usual)) return;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float largest = over_rows<kStreams>(row[j], larger);
    const float sum = over_rows<kStreams>(exp2_fast(row[j] - largest), plus);
    if (!usual) log_sums[j] = largest + log2_fast(sum);
  }
}

template <int kStreams>
__device__ __forceinline__ float row_sum(const float (&row)[kStreams]) {
  float sum = 0.f;
#pragma unroll
  for (float exponent : row) sum += exp2_fast(exponent);
  const bool usual = is_accurate(sum);
  const float logarithm = log2_fast(sum);
  if (__all_sync(~0u, usual)) return logarithm;
  float largest = row[0];
#pragma unroll
  for (float exponent : row) largest = fmaxf(largest, exponent);
  sum = 0.f;
#pragma unroll
  for (float exponent : row) sum += exp2_fast(exponent - largest);
  return usual ? logarithm : largest + log2_fast(sum);
}

// Sinkhorn iterations on a row of base-2 logarithms. `keep` receives what each step subtracts: the lane's own column's,
// then its row's.
template <int kStreams, class Keep>
__device__ __forceinline__ void normalize(float (&row)[kStreams], int iterations, int lane, Keep&& keep) {
  for (int i = 0; i < iterations; ++i) {
    float log_sums[kStreams], own = 0.f;
    column_sums(row, log_sums);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      row[j] -= log_sums[j];
      if (lane % kStreams == j) own = log_sums[j];
    }
    keep(2 * i, own);
    const float log_sum = row_sum(row);
#pragma unroll
    for (float& exponent : row) exponent -= log_sum;
    keep(2 * i + 1, log_sum);
  }
}

// The backward pass: from gradients of the weights' logarithms after the last step to those of h_res. `subtracted`
// returns what a step subtracted from column or row j.
template <int kStreams, class Subtracted>
__device__ __forceinline__ void normalize_bwd(float (&gradient)[kStreams], float (&row)[kStreams], int iterations,
                                              int lane, Subtracted&& subtracted) {
  for (int i = iterations - 1; i >= 0; --i) {
    float sum = 0.f;
#pragma unroll
    for (float part : gradient) sum += part;
    const float log_sum = subtracted(2 * i + 1, lane % kStreams);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) gradient[j] -= exp2_fast(row[j]) * sum, row[j] += log_sum;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      gradient[j] -= exp2_fast(row[j]) * over_rows<kStreams>(gradient[j], plus);
      row[j] += subtracted(2 * i, j);
    }
  }
}

// A thread's row of weights, among those of all tokens.
template <int kStreams>
struct Row {
  int64_t index;
  bool exists;
  float logarithms[kStreams];

  __device__ __forceinline__ explicit Row(const Params& p) : index(int64_t{blockIdx.x} * kRowThreads + threadIdx.x) {
    exists = index < int64_t{p.tokens} * kStreams;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) logarithms[j] = exists ? p.h_res[index * kStreams + j] * kLog2E : 0.f;
  }
};

template <int kStreams>
__global__ void __launch_bounds__(kRowThreads) mixing_kernel(const __grid_constant__ Params p) {
  launch_dependents();
  Row<kStreams> row(p);
  normalize<kStreams>(row.logarithms, p.iterations, threadIdx.x, [](int, float) {});
  if (!row.exists) return;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) p.mixing[row.index * kStreams + j] = exp2_fast(row.logarithms[j]);
}

// `dh_res` holds the gradients of the weights, and receives those of h_res.
template <int kStreams>
__global__ void __launch_bounds__(kRowThreads) mixing_bwd_kernel(const __grid_constant__ Params p) {
  __shared__ float subtracted[2 * kMaxIterations][kRowThreads];
  const int lane = threadIdx.x;
  Row<kStreams> row(p);
  normalize<kStreams>(row.logarithms, p.iterations, lane,
                      [&](int step, float log_sum) { subtracted[step][lane] = log_sum; });
  __syncwarp();
  wait_for_preceding_kernel();
  float gradient[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    gradient[j] = row.exists ? p.dh_res[row.index * kStreams + j] * exp2_fast(row.logarithms[j]) : 0.f;
  }
  normalize_bwd<kStreams>(gradient, row.logarithms, p.iterations, lane,
                          [&](int step, int j) { return subtracted[step][lane / kStreams * kStreams + j]; });
  if (!row.exists) return;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) p.dh_res[row.index * kStreams + j] = gradient[j];
}

// A token's weights; every lane has all of them.
template <int kStreams>
struct Weights {
  float mixing[kStreams][kStreams], h_post[kStreams];

  __device__ __forceinline__ Weights(const Params& p, int64_t token) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      h_post[i] = p.h_post[token * kStreams + i];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) mixing[i][j] = p.mixing[(token * kStreams + i) * kStreams + j];
    }
  }
};

template <int kStreams>
__global__ void __launch_bounds__(kMaxThreads, 3) mhc_post_fwd_kernel(const __grid_constant__ Params p) {
  const int pieces = p.columns / kPieceColumns;
  const int64_t token = blockIdx.x;
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
  auto* g_out = static_cast<Piece*>(p.out) + token * kStreams * pieces;
  Piece x[kStreams], y;
  const auto load = [&](int piece) {
    if (piece >= pieces) return;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = g_x[j * pieces + piece];
    y = g_y[piece];
  };
  load(threadIdx.x);
  wait_for_preceding_kernel();
  const Weights<kStreams> weights(p, token);
  for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    Piece out[kStreams];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float2 streams[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) streams[j] = unpack_bf16(x[j].words[c]);
      const float2 layer = unpack_bf16(y.words[c]);
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        float2 sum{weights.h_post[i] * layer.x, weights.h_post[i] * layer.y};
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          sum.x = fmaf(weights.mixing[i][j], streams[j].x, sum.x);
          sum.y = fmaf(weights.mixing[i][j], streams[j].y, sum.y);
        }
        out[i].words[c] = pack_bf16(sum.x, sum.y);
      }
    }
    load(piece + blockDim.x);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) g_out[i * pieces + piece] = out[i];
  }
}

// Warp sums: lane i gets that of values[i].
template <int kValues>
__device__ __forceinline__ float sums_of_warp(const float (&values)[kValues], int lane) {
  float own = 0.f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float sum = sum_of_warp(values[i]);
    if (lane == i) own = sum;
  }
  return own;
}

template <int kStreams>
__global__ void __launch_bounds__(kMaxThreads, 2) mhc_post_bwd_kernel(const __grid_constant__ Params p) {
  constexpr int kWeights = kStreams * kStreams, kSums = kWeights + kStreams;
  __shared__ float warp_sums[kMaxThreads / kWarpThreads][kSums];
  launch_dependents();
  const int pieces = p.columns / kPieceColumns;
  const int64_t token = blockIdx.x;
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_dout = static_cast<const Piece*>(p.dout) + token * kStreams * pieces;
  const auto* g_y = static_cast<const Piece*>(p.y) + token * pieces;
  auto* g_dx = static_cast<Piece*>(p.out) + token * kStreams * pieces;
  auto* g_dy = static_cast<Piece*>(p.dy) + token * pieces;
  Piece x[kStreams], dout[kStreams], y;
  const auto load = [&](int piece) {
    if (piece >= pieces) return;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = g_x[j * pieces + piece];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) dout[i] = g_dout[i * pieces + piece];
    y = g_y[piece];
  };
  load(threadIdx.x);
  wait_for_preceding_kernel();
  const Weights<kStreams> weights(p, token);
  float products[kSums] = {};  // of dout_i with x_j, then with y
  for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    Piece dy;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 layer = unpack_bf16(y.words[c]);
      float2 upstream[kStreams], dlayer{};
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        upstream[i] = unpack_bf16(dout[i].words[c]);
        const float h_post = weights.h_post[i];
        dlayer.x = fmaf(h_post, upstream[i].x, dlayer.x), dlayer.y = fmaf(h_post, upstream[i].y, dlayer.y);
        products[kWeights + i] = fmaf(upstream[i].x, layer.x, fmaf(upstream[i].y, layer.y, products[kWeights + i]));
      }
      dy.words[c] = pack_bf16(dlayer.x, dlayer.y);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float2 stream = unpack_bf16(x[j].words[c]);
        float2 dstream{};
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          const float weight = weights.mixing[i][j];
          dstream.x = fmaf(weight, upstream[i].x, dstream.x), dstream.y = fmaf(weight, upstream[i].y, dstream.y);
          float& product = products[i * kStreams + j];
          product = fmaf(upstream[i].x, stream.x, fmaf(upstream[i].y, stream.y, product));
        }
        x[j].words[c] = pack_bf16(dstream.x, dstream.y);
      }
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) g_dx[j * pieces + piece] = x[j];
    g_dy[piece] = dy;
    load(piece + blockDim.x);
  }
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const float warp_sum = sums_of_warp(products, lane);
  if (lane < kSums) warp_sums[warp][lane] = warp_sum;
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  float sum = 0.f;
  for (int from = 0; from < blockDim.x / kWarpThreads; ++from) sum += warp_sums[from][lane];
  if (lane < kWeights) {
    p.dh_res[token * kWeights + lane] = sum;
  } else {
    p.dh_post[token * kStreams + lane - kWeights] = sum;
  }
}

}  // namespace dsa::mhc_post
