// The gradients of mhc_pre_fwd, in two kernels chained by programmatic dependent launch (PDL). Math:
// docs/mhc/mhc_pre.md.
//
//   kernel   role (registers)     does                                                      waits on       signals
//   columns  copy: 1 thread (48)  loads x and dh_in of a tile; stores dx (TMA)              done           full (TMA)
//            sums: a warp for     sums of dh_in times x over the CTA's columns              full           messages,
//            each stream (48)                                                                             gates_full
//            gates: 2 warps (48)  dh_mix and other factors of some tokens, from the sums    messages       messages
//                                 of all CTAs with these tokens; terms of dbias and dalpha
//            fetch: 1 warp (48)   brings what was made for a tile                           messages, done gates_full
//            multiply: 4 or 8     dx of a tile, to shared memory; sums G for dphi, over     full,          done
//            warps (144 or 208)   a run of tokens                                           gates_full
//   reduce   CTA: columns, or an  sums over the runs: dphi, dgamma; or dbias, dalpha        columns
//            element of dbias,
//            dalpha
//
// 4 multiply warps with 2 streams, 8 with 4. With G = dh_mix^T x over all tokens, dphi is gamma G, and dgamma is the
// sum over phi's rows of phi G: so dh_mix gamma phi is needed for dx alone. As operands, gamma phi and dh_mix are split
// into two bf16 numbers each (rounded part and remainder).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "gates.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warp_mma.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

inline constexpr int kReduceColumns = 192, kReduceParts = 4, kReduceThreads = kReduceColumns * kReduceParts;

// Loads tiles and stores dx. Run by one thread.
template <int kStreams>
__device__ __forceinline__ void copy_tiles(ColumnStorage<kStreams>& shared, const Run& run, const CUtensorMap& x_map,
                                           const CUtensorMap& dh_in_map, const CUtensorMap& dx_map) {
  constexpr int kStages = Shape<kStreams>::kStages;
  const auto at = [&](int i, int chunk) {
    return HeadTile{run.first_column() + chunk * kChunk, run.tile(i) * kTokens, 0, 0, 0};
  };
  const auto load = [&](int i) {
    auto& tile = shared.tiles[i % kStages];
    uint64_t* full = &shared.full[i % kStages];
    arrive_and_expect(full, sizeof(tile));
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tma_load_once(tile.x[chunk], &x_map, at(i, chunk), full);
      tma_load_once(tile.dh_in[chunk], &dh_in_map, at(i, chunk), full);
    }
  };
  for (int i = 0; i < min(run.count, kStages); ++i) load(i);
  for (int i = 0; i < run.count; ++i) {
    wait(&shared.done[i % kStages], i / kStages % 2);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tma_store(&dx_map, shared.tiles[i % kStages].x[chunk], at(i, chunk));
    }
    tma_store_commit();
    if (i + kStages >= run.count) continue;
    tma_store_wait_read();
    load(i + kStages);
  }
  tma_store_wait_read();
}

// gamma phi of a warp's columns as B operands: rounded part and remainder.
template <int kStreams>
struct Weights {
  uint32_t parts[2][kGroups][Shape<kStreams>::kBlocks];

  __device__ __forceinline__ Weights(const Params& p, int64_t flat_column, int lane) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int64_t own = flat_column + group * 8 + lane / 4;
      const float gamma = p.gamma == nullptr ? 1.f : p.gamma[own];
      const auto load = [&](int place) {
        return gamma * p.phi[row_of_phi<kStreams>(place) * (int64_t{kStreams} * p.columns) + own];
      };
#pragma unroll
      for (int block = 0; block < Shape<kStreams>::kBlocks; ++block) {
        const int place = block * 8 + lane % 4 * 2;
        const float2 pair = {load(place), load(place + 1)};
        uint32_t &high = parts[0][group][block], &low = parts[1][group][block];
        high = pack_bf16(pair.x, pair.y);
        const float2 rounded = unpack_bf16(high);
        low = pack_bf16(pair.x - rounded.x, pair.y - rounded.y);
      }
    }
  }
};

// dx of a warp's columns of a tile, in place of x, and what the tile adds to G: 8 of its rows and 16 columns each.
template <int kStreams>
__device__ __forceinline__ void multiply_tile(char* x_tile, const char* dh_in_tile, const __nv_bfloat16* gates,
                                              const Weights<kStreams>& phi, int stream, int lane,
                                              float (&sums)[Shape<kStreams>::kBlocks][kGroups / 2][4]) {
  using S = Shape<kStreams>;
  constexpr int kMixed = S::kMixed, kBlocks = S::kBlocks;
  const int row = lane / 4;
  const auto place = [&](int half, int group) {  // of a lane's pair of columns
    return swizzled_offset(row + 8 * half, group) + lane % 4 * 4;
  };
  // dx begins with the terms of h_pre and of the norm.
  float dx[kGroups][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto* numbers = reinterpret_cast<const float*>(gates + (row + 8 * half) * S::kPitch + 2 * kMixed);
    const float h_pre = numbers[stream], factor = numbers[kStreams];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 x = unpack_bf16(*reinterpret_cast<const uint32_t*>(x_tile + place(half, group)));
      const float2 upstream = unpack_bf16(*reinterpret_cast<const uint32_t*>(dh_in_tile + place(half, group)));
      dx[group][2 * half] = fmaf(h_pre, upstream.x, -factor * x.x);
      dx[group][2 * half + 1] = fmaf(h_pre, upstream.y, -factor * x.y);
    }
  }
  // G: x of 16 columns and all tokens, transposed, times dh_mix.
  uint32_t x[kGroups / 2][4];
#pragma unroll
  for (int i = 0; i < kGroups / 2; ++i) {
    const int matrix = swizzled_offset(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2);
    load_matrices_transposed(shared_address(x_tile) + matrix, x[i]);
  }
  const __nv_bfloat16* const rows = gates + lane % 16 * S::kPitch;
  const __nv_bfloat16* const parts = rows + lane / 16 * kMixed;  // the rounded part, or the remainder
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t dh_mix[4];
    load_matrices_transposed(shared_address(parts + block * 8), dh_mix);
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) multiply(sums[block][i], x[i], dh_mix[0], dh_mix[1]);
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) multiply(sums[block][i], x[i], dh_mix[2], dh_mix[3]);
  }
  // dh_mix times gamma phi, without the product of both remainders: 16 rows of phi at a time, then the last 8.
  const auto& [phi_high, phi_low] = phi.parts;
#pragma unroll
  for (int block = 0; block + 1 < kBlocks; block += 2) {
    uint32_t high[4], low[4];
    load_matrices(shared_address(rows + block * 8 + lane / 16 * 8), high);
    load_matrices(shared_address(rows + kMixed + block * 8 + lane / 16 * 8), low);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) multiply(dx[i], high, phi_high[i][block], phi_high[i][block + 1]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) multiply(dx[i], low, phi_high[i][block], phi_high[i][block + 1]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) multiply(dx[i], high, phi_low[i][block], phi_low[i][block + 1]);
  }
  constexpr int kLast = kBlocks - 1;
  static_assert(kLast % 2 == 0);
  uint32_t both[4];  // the rounded part, then the remainder
  load_matrices(shared_address(parts + kLast * 8), both);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) multiply(dx[i], both, phi_high[i][kLast], phi_high[i][kLast]);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) multiply(dx[i], both[0], both[1], phi_low[i][kLast]);
  __syncwarp();  // all lanes have read what is overwritten next
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      *reinterpret_cast<uint32_t*>(x_tile + place(half, group)) =
          pack_bf16(dx[group][2 * half], dx[group][2 * half + 1]);
    }
  }
}

// A multiply warp: a chunk of a stream.
template <int kStreams>
__device__ __forceinline__ void multiply_tiles(ColumnStorage<kStreams>& shared, const Params& p, const Run& run,
                                               int warp, int lane) {
  constexpr int kBlocks = Shape<kStreams>::kBlocks;
  const int stream = warp / kChunks, chunk = warp % kChunks;
  const int64_t flat_columns = int64_t{kStreams} * p.columns;
  const int64_t flat_column = int64_t{stream} * p.columns + run.first_column() + chunk * kChunk;
  const Weights<kStreams> phi(p, flat_column, lane);
  float sums[kBlocks][kGroups / 2][4] = {};
  Ring<Shape<kStreams>::kStages> ring;
  for (int i = 0; i < run.count; ++i, ring.advance()) {
    wait(&shared.full[ring.slot], ring.parity);
    wait(&shared.gates_full[ring.slot], ring.parity);
    auto& tile = shared.tiles[ring.slot];
    multiply_tile(reinterpret_cast<char*>(tile.x[chunk][stream]), reinterpret_cast<const char*>(tile.dh_in[chunk]),
                  shared.gates[ring.slot], phi, stream, lane, sums);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(&shared.done[ring.slot]);
  }
  float* const g_parts = p.parts + int64_t{run.index} * Shape<kStreams>::kMixed * flat_columns + flat_column + lane / 4;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = row_of_phi<kStreams>(block * 8 + lane % 4 * 2 + j % 2);
        g_parts[m * flat_columns + i * 16 + j / 2 * 8] = sums[block][i][j];
      }
    }
  }
}

// A CTA has some columns of all streams, and a run of tokens.
template <int kStreams>
__global__ void __launch_bounds__(Shape<kStreams>::kThreads, ctas_per_sm(kStreams))
    columns_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap dh_in_map, const __grid_constant__ CUtensorMap dx_map) {
  using S = Shape<kStreams>;
  extern __shared__ __align__(1024) char shared_bytes[];
  launch_dependents();
  auto& shared = *reinterpret_cast<ColumnStorage<kStreams>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const Run run(p);

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.gates_full) barrier_init(&barrier, 1 + kStreams);
    for (uint64_t& barrier : shared.done) barrier_init(&barrier, S::kMultiplyWarps);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp < S::kMultiplyWarps) {
    set_registers<S::kMultiplyRegisters, S::kStart>();
    multiply_tiles(shared, p, run, warp, lane);
    return;
  }
  set_registers<kOtherRegisters, S::kStart>();
  const int other = warp - S::kMultiplyWarps;
  if (other < kStreams) {
    send_sums(shared, p, run, other, lane);
  } else if (other == kStreams) {
    fetch_gates(shared, p, run, lane);
  } else if (other == kStreams + 1) {
    if (lane == 0) copy_tiles(shared, run, x_map, dh_in_map, dx_map);
  } else if (other < kStreams + 2 + kGateWarps) {
    take_turns<kStreams>(p, run, other - kStreams - 2, lane);
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
#pragma unroll 32
  for (int64_t i = int64_t{begin} * p.tokens + threadIdx.x; i < int64_t{end} * p.tokens; i += kReduceThreads) {
    sum += p.terms[i];
  }
  sum = sum_of_cta(sum);
  if (threadIdx.x == 0) (part < 0 ? p.dbias[job] : p.dalpha[part]) = sum;
}

}  // namespace dsa::mhc_pre_bwd
