// The gradients of mhc_pre_fwd, in three kernels chained by programmatic dependent launch (PDL). Math:
// docs/mhc/mhc_pre.md.
//
//   kernel   role (registers)     does                                                       waits on     signals
//   gates    CTA: a token         gradients of the gates: dh_mix, terms of dbias and dalpha
//   columns  copy: 1 thread (24)  loads x, dh_in, dh_mix of a tile (dh_mix after gates);     done         full (TMA)
//                                 stores dx (TMA)
//            multiply: 8 or 16    dx of a tile, to shared memory; sums G for dphi, over a    full         done
//            warps (104 or 112)   run of tokens
//   reduce   CTA: columns, or an  sums over the runs: dphi, dgamma; or dbias, dalpha         columns
//            element of dbias,
//            dalpha
//
// 8 warps with 2 streams, 16 with 4. With G = dh_mix^T x over all tokens, dphi is gamma G, and dgamma is the sum over
// phi's rows of phi G: so dh_mix phi is needed for dx alone. As operands, phi and dh_mix are split into two bf16
// numbers each (rounded part and remainder).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warp_mma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

inline constexpr int kTokenThreads = 128, kTokenCtas = 8;  // of gates_kernel; CTAs per SM
inline constexpr int kChunk = 64;                          // columns: the swizzle has no longer rows
inline constexpr int kChunks = kColumns / kChunk, kStages = 4;
inline constexpr int kGroups = 4;  // per warp, of 8 columns
inline constexpr int kReduceColumns = 192, kReduceParts = 4, kReduceThreads = kReduceColumns * kReduceParts;

template <int kStreams>
struct Shape {
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kSteps = (kMixed + 15) / 16;  // of 16 rows of phi
  static constexpr int kPitch = pitch_of(kStreams);
  // A multiply warp has half a chunk of a stream. The copying thread has a warpgroup of its own, whose registers it
  // leaves to the others.
  static constexpr int kWarps = 2 * kChunks * kStreams, kThreads = kWarps * kWarpThreads + kWarpgroupThreads;
  static constexpr int kStart = 65536 / (ctas_per_sm(kStreams) * kThreads) / 8 * 8, kCopyRegisters = 24;
  static constexpr int kRegisters =
      (kStart * kThreads - kCopyRegisters * kWarpgroupThreads) / (kWarps * kWarpThreads) / 8 * 8;
};

// After a row of dh_mix, scratch has room for 4 numbers: h_pre after the rounded part, and the factor of x after the
// remainder.
template <int kStreams>
__device__ __forceinline__ float* padding_after_row(__nv_bfloat16* row) {
  return reinterpret_cast<float*>(row + Shape<kStreams>::kSteps * 16);
}

// 8 columns of a token's dh_in, and of its streams.
template <int kStreams>
struct Pieces {
  Piece upstream, streams[kStreams];
};

// One CTA per token, the last one first: the next kernel begins with the first ones, of which L2 then has many.
template <int kStreams>
__global__ void __launch_bounds__(kTokenThreads, kTokenCtas) gates_kernel(const __grid_constant__ Params p) {
  constexpr int kMixed = Shape<kStreams>::kMixed, kPitch = Shape<kStreams>::kPitch;
  constexpr int kTokenWarps = kTokenThreads / kWarpThreads;
  launch_dependents();
  __shared__ float warp_sums[kTokenWarps][kStreams];
  const int64_t token = gridDim.x - 1 - blockIdx.x;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, pieces = p.columns / kPieceColumns;
  auto* g_high = static_cast<__nv_bfloat16*>(p.dh_mix) + token * kPitch;
  auto* g_low = g_high + int64_t{p.padded_tokens} * kPitch;
  if (token >= p.tokens) {
    if (threadIdx.x < kPitch) g_high[threadIdx.x] = g_low[threadIdx.x] = __float2bfloat16_rn(0.f);
    return;
  }
  const auto* g_x = static_cast<const Piece*>(p.x) + token * kStreams * pieces;
  const auto* g_dh_in = static_cast<const Piece*>(p.dh_in) + token * pieces;
  float sums[kStreams] = {};
  const auto load = [&](int piece) {
    Pieces<kStreams> loaded;
    if (piece < pieces) {
      loaded.upstream = g_dh_in[piece];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) loaded.streams[i] = g_x[i * pieces + piece];
    }
    return loaded;
  };
  Pieces<kStreams> next = load(threadIdx.x);
  for (int piece = threadIdx.x; piece < pieces; piece += kTokenThreads) {
    const Pieces<kStreams> now = next;
    next = load(piece + kTokenThreads);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i] += dot_bf16(now.streams[i].words[j], now.upstream.words[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float sum = sum_of_warp(sums[i]);
    if (lane == 0) warp_sums[warp][i] = sum;
  }
  __syncthreads();
  if (warp > 0) return;
  const float inv_rms = p.inv_rms[token];
  float dsum = 0.f, dmixed = 0.f, along = 0.f;
  if (lane < kMixed) {
    const int part = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
    if (part == 0) {
      for (const auto& stream_sums : warp_sums) dsum += stream_sums[lane];
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
  along = sum_of_warp(along);
  if (lane < kStreams) padding_after_row<kStreams>(g_high)[lane] = p.h_pre[token * kStreams + lane];
  if (lane == 0) padding_after_row<kStreams>(g_low)[0] = along * inv_rms * inv_rms * inv_rms / (kStreams * p.columns);
  if (lane >= Shape<kStreams>::kSteps * 16) return;
  const float dh_mix = dmixed * inv_rms;  // 0 in the padding after row kMixed
  const __nv_bfloat16 high = __float2bfloat16_rn(dh_mix);
  g_high[lane] = high, g_low[lane] = __float2bfloat16_rn(dh_mix - __bfloat162float(high));
}

template <int kStreams>
struct ColumnStorage {
  static constexpr int kPitch = Shape<kStreams>::kPitch;

  struct Stage {
    alignas(1024) __nv_bfloat16 x[kChunks][kStreams][kTokens * kChunk], dh_in[kChunks][kTokens * kChunk];
    alignas(16) __nv_bfloat16 dh_mix[2][kTokens * kPitch];
  };

  Stage stages[kStages];
  uint64_t full[kStages], done[kStages];
};

// A CTA's run of tiles of tokens: every p.runs-th tile, so that all CTAs read tokens that are near each other.
struct Run {
  int first_column, index, count, step;

  __device__ __forceinline__ int tile(int i) const { return index + i * step; }

  __device__ __forceinline__ explicit Run(const Params& p) {
    const int slices = p.columns / kColumns, tiles = (p.tokens - 1) / kTokens + 1;
    first_column = blockIdx.x % slices * kColumns, index = blockIdx.x / slices;
    step = p.runs, count = (tiles - index + p.runs - 1) / p.runs;
  }
};

// Producer, and stores of dx. Run by one thread.
template <int kStreams>
__device__ __forceinline__ void copy_tiles(ColumnStorage<kStreams>& shared, const Params& p, const Run& run,
                                           const CUtensorMap& x_map, const CUtensorMap& dh_in_map,
                                           const CUtensorMap& dx_map) {
  constexpr int kPitch = Shape<kStreams>::kPitch;
  const auto copy_inputs = [&](int i) {
    auto& stage = shared.stages[i % kStages];
    uint64_t* full = &shared.full[i % kStages];
    arrive_and_expect(full, sizeof(stage.x) + sizeof(stage.dh_in) + sizeof(stage.dh_mix));
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const HeadTile at{run.first_column + chunk * kChunk, run.tile(i) * kTokens, 0, 0, 0};
      tma_load_once(stage.x[chunk], &x_map, at, full);
      tma_load_once(stage.dh_in[chunk], &dh_in_map, at, full);
    }
  };
  const auto copy_gates = [&](int i) {
    const auto* g_dh_mix = static_cast<const __nv_bfloat16*>(p.dh_mix) + int64_t{run.tile(i)} * kTokens * kPitch;
    for (auto& part : shared.stages[i % kStages].dh_mix) {
      bulk_load(part, g_dh_mix, sizeof(part), &shared.full[i % kStages]);
      g_dh_mix += int64_t{p.padded_tokens} * kPitch;
    }
  };
  const int ahead = min(run.count, kStages);
  for (int i = 0; i < ahead; ++i) copy_inputs(i);
  wait_for_preceding_kernel();
  for (int i = 0; i < ahead; ++i) copy_gates(i);
  for (int i = 0; i < run.count; ++i) {
    wait(&shared.done[i % kStages], i / kStages % 2);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tma_store(&dx_map, shared.stages[i % kStages].x[chunk],
                {run.first_column + chunk * kChunk, run.tile(i) * kTokens, 0, 0, 0});
    }
    tma_store_commit();
    // Refill the stage of the tile before, whose stores have been read meanwhile.
    const int next = i - 1 + kStages;
    if (i > 0 && next < run.count) {
      tma_store_wait_read<1>();
      copy_inputs(next);
      copy_gates(next);
    }
  }
  tma_store_wait_read();
}

// A CTA has some columns of all streams, and a run of tokens; a warp has 32 of the columns.
template <int kStreams>
__global__ void __launch_bounds__(Shape<kStreams>::kThreads, ctas_per_sm(kStreams))
    columns_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap dh_in_map, const __grid_constant__ CUtensorMap dx_map) {
  using S = Shape<kStreams>;
  constexpr int kMixed = S::kMixed, kSteps = S::kSteps, kPitch = S::kPitch;
  extern __shared__ __align__(1024) char shared_bytes[];
  launch_dependents();
  auto& shared = *reinterpret_cast<ColumnStorage<kStreams>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const Run run(p);

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.done) barrier_init(&barrier, S::kWarps);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp >= S::kWarps) {
    set_registers<S::kCopyRegisters, S::kStart>();
    if (warp == S::kWarps && lane == 0) copy_tiles(shared, p, run, x_map, dh_in_map, dx_map);
    return;
  }
  set_registers<S::kRegisters, S::kStart>();
  // This warp's 32 columns: phi as B operands, and gamma of the lane's accumulators.
  const int row = lane / 4, column = lane % 4 * 2;
  const int stream = warp / (2 * kChunks), chunk = warp / 2 % kChunks, first_piece = warp % 2 * kGroups;
  const int warp_column = run.first_column + chunk * kChunk + first_piece * 8;
  const int64_t flat_columns = int64_t{kStreams} * p.columns, flat_column = int64_t{stream} * p.columns + warp_column;
  uint32_t phi[2][kGroups][kSteps][2];  // rounded part and remainder
  float2 gamma[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
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

  float sums[kSteps][kGroups][4] = {};  // G of 16 rows of phi and 8 columns each
  for (int i = 0; i < run.count; ++i) {
    auto& stage = shared.stages[i % kStages];
    wait(&shared.full[i % kStages], i / kStages % 2);
    char* x_tile = reinterpret_cast<char*>(stage.x[chunk][stream]);
    const char* dh_in_tile = reinterpret_cast<const char*>(stage.dh_in[chunk]);
#pragma unroll 1
    for (int first = 0; first < kTokens; first += 16) {
      float dv[kGroups][4] = {};
      uint32_t x[kGroups / 2][4];  // 16 tokens as the K dimension, two groups of 8 columns each
#pragma unroll
      for (int i = 0; i < kGroups / 2; ++i) {
        const int place = swizzled_offset(first + lane % 16, first_piece + 2 * i + lane / 16);
        load_matrices_transposed(shared_address(x_tile) + place, x[i]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto* rows = stage.dh_mix[part] + first * kPitch + step * 16;
          uint32_t a[4], transposed[4];
          load_matrices(shared_address(rows + lane % 16 * kPitch + lane / 16 * 8), a);
          load_matrices_transposed(shared_address(rows + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8),
                                   transposed);
          // Ordered so that consecutive products do not depend on each other.
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply(dv[group], a, phi[0][group][step][0], phi[0][group][step][1]);
          }
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply(sums[step][group], transposed, x[group / 2][group % 2 * 2], x[group / 2][group % 2 * 2 + 1]);
          }
          if (part == 1) continue;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply(dv[group], a, phi[1][group][step][0], phi[1][group][step][1]);
          }
        }
      }
      uint32_t dx[2][kGroups];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = first + row + 8 * half;
        const float h_pre = padding_after_row<kStreams>(stage.dh_mix[0] + t * kPitch)[stream];
        const float factor = padding_after_row<kStreams>(stage.dh_mix[1] + t * kPitch)[0];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int place = swizzled_offset(t, first_piece + group) + column * 2;
          const float2 x_pair = unpack_bf16(*reinterpret_cast<const uint32_t*>(x_tile + place));
          const float2 upstream = unpack_bf16(*reinterpret_cast<const uint32_t*>(dh_in_tile + place));
          dx[half][group] =
              pack_bf16(fmaf(gamma[group].x, dv[group][2 * half], fmaf(h_pre, upstream.x, -factor * x_pair.x)),
                        fmaf(gamma[group].y, dv[group][2 * half + 1], fmaf(h_pre, upstream.y, -factor * x_pair.y)));
        }
      }
      __syncwarp();  // all lanes have read what is overwritten next
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int place = swizzled_offset(first + row + 8 * half, first_piece + group) + column * 2;
          *reinterpret_cast<uint32_t*>(x_tile + place) = dx[half][group];
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(&shared.done[i % kStages]);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = step * 16 + half * 8 + row;
        if (m >= kMixed) continue;
        float* g_part = p.parts + (int64_t{run.index} * kMixed + m) * flat_columns + flat_column + group * 8 + column;
        *reinterpret_cast<float2*>(g_part) = {sums[step][group][2 * half], sums[step][group][2 * half + 1]};
      }
    }
  }
}

// Sum over a CTA, in a fixed order; only the first thread gets it.
__device__ __forceinline__ float sum_of_cta(float value) {
  __shared__ float warp_sums[kReduceThreads / kWarpThreads];
  value = sum_of_warp(value);
  if (threadIdx.x % kWarpThreads == 0) warp_sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  float sum = 0.f;
  for (float warp_sum : warp_sums) sum += warp_sum;
  return sum;
}

// The first CTAs sum over the runs: a thread has a column and a quarter of phi's rows. Each other CTA sums one element
// of dbias or dalpha, whose terms are adjacent in scratch.
template <int kStreams>
__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const __grid_constant__ Params p) {
  constexpr int kMixed = Shape<kStreams>::kMixed, kRows = kMixed / kReduceParts;
  wait_for_preceding_kernel();
  const int64_t columns = int64_t{kStreams} * p.columns;
  const int job = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x - kMixed - 3);
  if (job < 0) {
    __shared__ float partial_dgamma[kReduceParts][kReduceColumns];
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
      partial_dgamma[part][own] = dgamma;
    }
    __syncthreads();
    if (p.gamma == nullptr || part > 0 || column >= columns) return;
    float dgamma = 0.f;
#pragma unroll
    for (const auto& partial : partial_dgamma) dgamma += partial[own];
    p.dgamma[column] = dgamma;
    return;
  }
  const int part = job - kMixed;  // element of alpha; its terms follow those of bias
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
