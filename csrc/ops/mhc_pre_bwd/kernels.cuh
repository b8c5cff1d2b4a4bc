// The gradients of mhc_pre_fwd in three kernels: of the gates, token by token; of x, and of phi over runs of tokens, by
// columns; and sums over the runs. docs/mhc.md has the maths.
//
// With G = dh_mix' x, over all tokens, dphi is gamma G and dgamma the sum over phi's rows of phi G: so dh_mix phi is
// needed for dx alone, which is bf16, and a rounded phi will do for it. In G, whose sum is long, dh_mix is split in two
// bf16 numbers.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warp_mma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

inline constexpr int kTokenThreads = 256;
inline constexpr int kColumns = 64, kStreamsOfCta = 2;  // of a tile of x
inline constexpr int kStages = 3;
inline constexpr int kWarps = 8, kColumnThreads = kWarps * kWarpThreads;
inline constexpr int kReduceColumns = 192, kReduceParts = 4, kReduceThreads = kReduceColumns * kReduceParts;

template <int kStreams>
struct Shape {
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kSteps = (kMixed + 15) / 16;  // of 16 rows of phi
  static constexpr int kPitch = pitch_of(kStreams);
};

// Behind a row of dh_mix in scratch there is room for 4 numbers: h_pre behind what is rounded, and what x is multiplied
// by behind what that leaves out.
template <int kStreams>
__device__ __forceinline__ float* behind(__nv_bfloat16* row) {
  return reinterpret_cast<float*>(row + Shape<kStreams>::kSteps * 16);
}

// A token a CTA.
template <int kStreams>
__global__ void __launch_bounds__(kTokenThreads) gates_kernel(const __grid_constant__ Params p) {
  constexpr int kMixed = Shape<kStreams>::kMixed, kPitch = Shape<kStreams>::kPitch;
  constexpr int kTokenWarps = kTokenThreads / kWarpThreads;
  __shared__ float of_warps[kTokenWarps][kStreams];
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, pieces = p.columns / 8;
  auto* g_high = static_cast<__nv_bfloat16*>(p.dh_mix) + token * kPitch;
  auto* g_low = g_high + int64_t{p.padded_tokens} * kPitch;
  if (token >= p.tokens) {
    if (threadIdx.x < kPitch) g_high[threadIdx.x] = g_low[threadIdx.x] = __float2bfloat16_rn(0.f);
    return;
  }
  const auto* g_x = static_cast<const uint4*>(p.x) + token * kStreams * pieces;
  const auto* g_dh_in = static_cast<const uint4*>(p.dh_in) + token * pieces;
  float sums[kStreams] = {};
  for (int piece = threadIdx.x; piece < pieces; piece += kTokenThreads) {
    const uint4 upstream = g_dh_in[piece];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      const uint4 stream = g_x[i * pieces + piece];
      sums[i] += dot_bf16(stream.x, upstream.x) + dot_bf16(stream.y, upstream.y) + dot_bf16(stream.z, upstream.z) +
                 dot_bf16(stream.w, upstream.w);
    }
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], lanes);
    if (lane == 0) of_warps[warp][i] = sums[i];
  }
  __syncthreads();
  if (warp > 0) return;
  const float inv_rms = p.inv_rms[token];
  float dsum = 0.f, dmixed = 0.f, along = 0.f;
  if (lane < kMixed) {
    const int part = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
    if (part == 0) {
      for (const auto& of_warp : of_warps) dsum += of_warp[lane];
      const float share = p.h_pre[token * kStreams + lane] - p.eps;
      dsum *= share * (1.f - share);
    } else if (part == 1) {
      const int64_t i = token * kStreams + lane - kStreams;
      dsum = p.dh_post[i] * p.h_post[i] * (1.f - 0.5f * p.h_post[i]);
    } else {
      dsum = p.dh_res[token * kStreams * kStreams + lane - 2 * kStreams];
    }
    const float mix = p.h_mix[token * kMixed + lane];
    p.terms[lane * int64_t{p.tokens} + token] = dsum;
    p.terms[(kMixed + lane) * int64_t{p.tokens} + token] = dsum * mix * inv_rms;
    dmixed = p.alpha[part] * dsum;
    along = dmixed * mix;
  }
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) along += __shfl_xor_sync(~0u, along, lanes);
  if (lane < kStreams) behind<kStreams>(g_high)[lane] = p.h_pre[token * kStreams + lane];
  if (lane == 0) behind<kStreams>(g_low)[0] = along * inv_rms * inv_rms * inv_rms / (kStreams * p.columns);
  if (lane >= Shape<kStreams>::kSteps * 16) return;
  const float dh_mix = dmixed * inv_rms;  // zero behind the last
  const __nv_bfloat16 high = __float2bfloat16_rn(dh_mix);
  g_high[lane] = high, g_low[lane] = __float2bfloat16_rn(dh_mix - __bfloat162float(high));
}

template <int kStreams>
struct ColumnStorage {
  static constexpr int kPitch = Shape<kStreams>::kPitch;

  struct Stage {
    alignas(1024) __nv_bfloat16 x[kStreamsOfCta][kTokens * kColumns], dh_in[kTokens * kColumns];
    alignas(16) __nv_bfloat16 dh_mix[2][kTokens * kPitch];
  };

  Stage stages[kStages];
  uint64_t full[kStages];
};

// A CTA has the same columns of two streams, and a run of tokens; a warp 16 of the columns.
template <int kStreams>
__global__ void __launch_bounds__(kColumnThreads, 2)
    columns_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap dh_in_map, const __grid_constant__ CUtensorMap dx_map) {
  using S = Shape<kStreams>;
  constexpr int kMixed = S::kMixed, kSteps = S::kSteps, kPitch = S::kPitch;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<ColumnStorage<kStreams>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  // Streams side by side, so that what they read of dh_in is in L2.
  constexpr int kPairs = kStreams / kStreamsOfCta;
  const int first_stream = blockIdx.x % kPairs * kStreamsOfCta, slices = p.columns / kColumns;
  const int slice = blockIdx.x / kPairs % slices, run = blockIdx.x / kPairs / slices;
  const int first_column = slice * kColumns, stream = first_stream + warp / 4;
  const int tiles = (p.tokens - 1) / kTokens + 1;
  const int first_tile = static_cast<int>(int64_t{tiles} * run / p.runs);
  const int end_tile = static_cast<int>(int64_t{tiles} * (run + 1) / p.runs);

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const auto copy_tile = [&](int tile) {  // by thread 0
    auto& stage = shared.stages[(tile - first_tile) % kStages];
    uint64_t* full = &shared.full[(tile - first_tile) % kStages];
    const int token = tile * kTokens;
    constexpr int kBytes = kTokens * kPitch * sizeof(__nv_bfloat16);
    arrive_and_expect(full, (kStreamsOfCta + 1) * kTokens * kColumns * 2 + 2 * kBytes);
    for (int i = 0; i < kStreamsOfCta; ++i) {
      tma_load_once(stage.x[i], &x_map, {first_column, first_stream + i, 0, token, 0}, full);
    }
    tma_load(stage.dh_in, &dh_in_map, {first_column, 0, 0, token, 0}, full);
    const auto* g_dh_mix = static_cast<const __nv_bfloat16*>(p.dh_mix) + static_cast<int64_t>(token) * kPitch;
    for (int part = 0; part < 2; ++part) {
      bulk_load(stage.dh_mix[part], g_dh_mix + part * int64_t{p.padded_tokens} * kPitch, kBytes, full);
    }
  };
  if (threadIdx.x == 0) {
    for (int tile = first_tile; tile < min(end_tile, first_tile + kStages); ++tile) copy_tile(tile);
  }

  // This warp's 16 columns: of phi as right operands, and of gamma where a lane has sums.
  const int row = lane / 4, column = lane % 4 * 2;
  const int warp_column = first_column + warp % 4 * 16;
  const int64_t flat_columns = int64_t{kStreams} * p.columns, flat_column = int64_t{stream} * p.columns + warp_column;
  uint32_t phi[2][2][kSteps][2];  // rounded, and what that leaves out
  float2 gamma[2];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int64_t own = flat_column + group * 8;
    gamma[group] = p.gamma == nullptr ? float2{1.f, 1.f} : float2{p.gamma[own + column], p.gamma[own + column + 1]};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pair[2];
        for (int i = 0; i < 2; ++i) {
          const int m = step * 16 + half * 8 + column + i;
          pair[i] = m < kMixed ? p.phi[m * flat_columns + own + row] : 0.f;
        }
        phi[0][group][step][half] = pack_bf16(pair[0], pair[1]);
        const float2 rounded = unpack_bf16(phi[0][group][step][half]);
        phi[1][group][step][half] = pack_bf16(pair[0] - rounded.x, pair[1] - rounded.y);
      }
    }
  }

  float sums[kSteps][2][4] = {};  // G of 16 rows of phi and 8 columns each
  for (int tile = first_tile; tile < end_tile; ++tile) {
    const int index = tile - first_tile;
    auto& stage = shared.stages[index % kStages];
    wait(&shared.full[index % kStages], index / kStages % 2);
    char* x_tile = reinterpret_cast<char*>(stage.x[warp / 4]);
    const char* dh_in_tile = reinterpret_cast<const char*>(stage.dh_in);
    const int first_piece = warp % 4 * 2;
#pragma unroll 1
    for (int first = 0; first < kTokens; first += 16) {
      if (tile * kTokens + first >= p.tokens) break;
      float dv[2][4] = {};
      uint32_t x[4];  // 16 tokens as the reduction, two groups of 8 columns
      load_matrices_transposed(shared_address(x_tile) + swizzled_offset(first + lane % 16, first_piece + lane / 16), x);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto* rows = stage.dh_mix[part] + first * kPitch + step * 16;
          load_matrices(shared_address(rows + lane % 16 * kPitch + lane / 16 * 8), a);
#pragma unroll
          for (int group = 0; group < 2; ++group) {
            multiply(dv[group], a, phi[0][group][step][0], phi[0][group][step][1]);
            if (part == 0) multiply(dv[group], a, phi[1][group][step][0], phi[1][group][step][1]);
          }
          load_matrices_transposed(shared_address(rows + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8), a);
#pragma unroll
          for (int group = 0; group < 2; ++group) multiply(sums[step][group], a, x[2 * group], x[2 * group + 1]);
        }
      }
      uint32_t dx[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = first + row + 8 * half;
        const float h_pre = behind<kStreams>(stage.dh_mix[0] + t * kPitch)[stream];
        const float factor = behind<kStreams>(stage.dh_mix[1] + t * kPitch)[0];
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const int place = swizzled_offset(t, first_piece + group) + column * 2;
          const float2 of_x = unpack_bf16(*reinterpret_cast<const uint32_t*>(x_tile + place));
          const float2 upstream = unpack_bf16(*reinterpret_cast<const uint32_t*>(dh_in_tile + place));
          dx[half][group] =
              pack_bf16(fmaf(gamma[group].x, dv[group][2 * half], fmaf(h_pre, upstream.x, -factor * of_x.x)),
                        fmaf(gamma[group].y, dv[group][2 * half + 1], fmaf(h_pre, upstream.y, -factor * of_x.y)));
        }
      }
      __syncwarp();  // all have read what is now overwritten
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const int place = swizzled_offset(first + row + 8 * half, first_piece + group) + column * 2;
          *reinterpret_cast<uint32_t*>(x_tile + place) = dx[half][group];
        }
      }
    }
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStreamsOfCta; ++i) {
        tma_store(&dx_map, stage.x[i], {first_column, first_stream + i, 0, tile * kTokens, 0});
      }
      tma_store_commit();
      // Into the stage of the tile before, which has left meanwhile.
      if (tile > first_tile && tile - 1 + kStages < end_tile) {
        tma_store_wait_read<1>();
        copy_tile(tile - 1 + kStages);
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = step * 16 + half * 8 + row;
        if (m >= kMixed) continue;
        float* g_part = p.parts + (int64_t{run} * kMixed + m) * flat_columns + flat_column + group * 8 + column;
        *reinterpret_cast<float2*>(g_part) = {sums[step][group][2 * half], sums[step][group][2 * half + 1]};
      }
    }
  }
  if (threadIdx.x == 0) tma_store_wait_read();
}

// Of a CTA, in a fixed order; the first thread has it.
__device__ __forceinline__ float sum_of_cta(float value) {
  __shared__ float of_warps[kReduceThreads / kWarpThreads];
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  if (threadIdx.x % kWarpThreads == 0) of_warps[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  float sum = 0.f;
  for (float of_warp : of_warps) sum += of_warp;
  return sum;
}

// The first CTAs sum over the runs: a thread has a column, and a quarter of phi's rows. The others have a gradient each
// of bias, and then of alpha, which are sums of neighbours in scratch.
template <int kStreams>
__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const __grid_constant__ Params p) {
  constexpr int kMixed = Shape<kStreams>::kMixed, kRows = kMixed / kReduceParts;
  const int64_t columns = int64_t{kStreams} * p.columns;
  const int job = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x - kMixed - 3);
  if (job < 0) {
    __shared__ float of_gamma[kReduceParts][kReduceColumns];
    const int own = threadIdx.x % kReduceColumns, part = threadIdx.x / kReduceColumns;
    const int64_t column = int64_t{blockIdx.x} * kReduceColumns + own;
    if (column < columns) {
      float sums[kRows] = {}, dgamma = 0.f;
      for (int run = 0; run < p.runs; ++run) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          sums[i] += p.parts[(int64_t{run} * kMixed + part * kRows + i) * columns + column];
        }
      }
      const float gamma = p.gamma == nullptr ? 1.f : p.gamma[column];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t place = (part * kRows + i) * columns + column;
        p.dphi[place] = gamma * sums[i];
        dgamma = fmaf(p.phi[place], sums[i], dgamma);
      }
      of_gamma[part][own] = dgamma;
    }
    __syncthreads();
    if (p.gamma == nullptr || part > 0 || column >= columns) return;
    float dgamma = 0.f;
#pragma unroll
    for (const auto& of_part : of_gamma) dgamma += of_part[own];
    p.dgamma[column] = dgamma;
    return;
  }
  const int part = job - kMixed;  // of alpha, whose terms are behind those of bias
  const int begin = part < 0 ? job : kMixed + part * kStreams;
  const int end = part < 0 ? job + 1 : part == 2 ? 2 * kMixed : begin + kStreams;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t i = int64_t{begin} * p.tokens + threadIdx.x; i < int64_t{end} * p.tokens; i += kReduceThreads) {
    sum += p.terms[i];
  }
  sum = sum_of_cta(sum);
  if (threadIdx.x == 0) (part < 0 ? p.dbias[job] : p.dalpha[part]) = sum;
}

}  // namespace dsa::mhc_pre_bwd
