// The gates of hyper-connections and what a layer reads of the streams, for 16 tokens at a time.
//
// A cluster of CTAs shares the columns: each has a run of them, of every stream, so that it sees all that it needs for
// its part of h_in, and reads x once. phi, times gamma and split in two bf16 numbers, stays in registers: warp
// 4 * stream + quarter has a quarter of each 64 columns of that stream, as right operands, and x from shared memory is
// the left one. Its products with itself give the sums of squares. A tile's sums go from the warps through shared
// memory to the CTA that owns the token, which adds them up in a fixed order, makes the gates, and sends h_pre to all:
// both ways through distributed shared memory while the next tile is multiplied. docs/mhc.md has the maths.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_fwd {

using namespace dsa::sm90;

inline constexpr int kTokens = 16;  // of a tile
inline constexpr int kChunk = 64;   // columns of a stream that are copied together
inline constexpr int kStages = 3;

template <int kStreams, int kChunks>
struct Shape {
  static constexpr int kWarps = 4 * kStreams, kThreads = kWarps * kWarpThreads;
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kSums = kMixed + 1;  // and of squares
};

template <int kStreams, int kChunks>
struct SharedStorage {
  using S = Shape<kStreams, kChunks>;
  alignas(1024) __nv_bfloat16 x[kStages][kStreams][kChunks][kTokens * kChunk];
  float parts[S::kWarps][kTokens][S::kSums + 1];  // of the warps
  float received[2][kTokens][S::kSums];           // of this CTA's tokens: of each CTA of the cluster
  float h_pre[2][kTokens][kStreams];
  uint64_t full[kStages], received_full[2], h_pre_full[2];
};

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address of the same place in another CTA's shared memory.
__device__ __forceinline__ uint32_t remote_address(const void* place, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  return address;
}

// st.async: a number for another CTA, of which its barrier is told
__device__ __forceinline__ void send(const float* place, float value, const uint64_t* barrier, int rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   remote_address(place, rank)),
               "r"(__float_as_uint(value)), "r"(remote_address(barrier, rank))
               : "memory");
}

// mma.m16n8k16: 16 x 8 sums += 16 rows of 16 . 8 rows of 16
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Operands of one step of 16 columns: each 8 rows of phi, rounded, and what that leaves out.
template <int kMixed>
struct Weights {
  static constexpr int kGroups = kMixed / 8;
  uint32_t high[kGroups][2], low[kGroups][2];

  __device__ __forceinline__ void load(const Params& p, int first_column, bool exists, int lane) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t column = first_column + half * 8 + lane % 4 * 2;
        float2 pair{};
        if (exists) {
          const int64_t row = group * 8 + lane / 4;
          pair = *reinterpret_cast<const float2*>(p.phi + row * p.streams * p.columns + column);
          if (p.gamma != nullptr) pair.x *= p.gamma[column], pair.y *= p.gamma[column + 1];
        }
        high[group][half] = pack_bf16(pair.x, pair.y);
        const float2 rounded = unpack(high[group][half]);
        low[group][half] = pack_bf16(pair.x - rounded.x, pair.y - rounded.y);
      }
    }
  }
};

// Of one token, by a warp: lane m has the sum with row m of phi, and the one behind these that of squares.
template <int kStreams, int kMixed>
__device__ __forceinline__ float make_gates(const Params& p, float sum, int64_t token, int lane) {
  const float squares = __shfl_sync(~0u, sum, kMixed);
  const float inv_rms = rsqrtf(squares / (kStreams * p.columns) + p.eps);
  const int part = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
  const float mixed = lane < kMixed ? p.alpha[part] * (sum * inv_rms) + p.bias[lane] : 0.f;
  const float sigmoid = 1.f / (1.f + __expf(-mixed));
  if (token < p.tokens) {
    if (lane < kMixed) p.h_mix[token * kMixed + lane] = sum;
    if (lane == 0) p.inv_rms[token] = inv_rms;
    if (part == 0) p.h_pre[token * kStreams + lane] = sigmoid + p.eps;
    if (part == 1) p.h_post[token * kStreams + lane - kStreams] = 2.f * sigmoid;
    if (part == 2 && lane < kMixed) p.h_res[token * kStreams * kStreams + lane - 2 * kStreams] = mixed;
  }
  return sigmoid + p.eps;
}

template <int kStreams, int kChunks>
__global__ void __launch_bounds__(Shape<kStreams, kChunks>::kThreads, 1)
    mhc_pre_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map, int ctas) {
  using S = Shape<kStreams, kChunks>;
  constexpr int kMixed = S::kMixed, kSums = S::kSums;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kStreams, kChunks>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const int rank = cluster_rank(), cluster = blockIdx.x / ctas, clusters = gridDim.x / ctas;
  const int all_chunks = p.columns / kChunk;
  const int first_chunk = all_chunks * rank / ctas, chunks = all_chunks * (rank + 1) / ctas - first_chunk;
  const int tiles = (p.tokens - 1) / kTokens + 1;
  const int own_tokens = kTokens / ctas;  // of each tile

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.received_full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.h_pre_full) barrier_init(&barrier, 1);
    fence_barrier_init();
  }
  cute::cluster_arrive();
  cute::cluster_wait();

  const int my_tiles = cluster < tiles ? (tiles - 1 - cluster) / clusters + 1 : 0;
  // By warp 0: the tile that is this cluster's number `i`.
  const auto copy_tile = [&](int i) {
    if (i >= my_tiles) return;
    const int stage = i % kStages;
    if (lane == 0) arrive_and_expect(&shared.full[stage], kStreams * chunks * kTokens * kChunk * 2);
    __syncwarp();
    for (int box = lane; box < kStreams * chunks; box += kWarpThreads) {
      const int stream = box / chunks, chunk = box % chunks;
      tma_load(shared.x[stage][stream][chunk], &x_map,
               {(first_chunk + chunk) * kChunk, stream, 0, (cluster + i * clusters) * kTokens, 0}, &shared.full[stage]);
    }
  };
  if (warp == 0) {
    copy_tile(0);
    copy_tile(1);
  }
  const int stream = warp / 4, quarter = warp % 4;
  Weights<kMixed> weights[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = stream * p.columns + (first_chunk + chunk) * kChunk + quarter * 16;
    weights[chunk].load(p, column, chunk < chunks, lane);
  }

  for (int i = 0; i <= my_tiles; ++i) {
    const auto token_of = [&](int tile, int t) { return int64_t{cluster + tile * clusters} * kTokens + t; };
    // Of the last tile: the gates of this CTA's tokens.
    if (i > 0 && warp < own_tokens) {
      uint64_t* barrier = &shared.received_full[(i - 1) % 2];
      if (warp == 0 && lane == 0) arrive_and_expect(barrier, own_tokens * ctas * kSums * sizeof(float));
      wait(barrier, (i - 1) / 2 % 2);
      float sum = 0.f;
      for (int from = 0; from < ctas; ++from) {
        if (lane < kSums) sum += shared.received[(i - 1) % 2][warp * ctas + from][lane];
      }
      const int t = rank * own_tokens + warp;
      const float h_pre = make_gates<kStreams, kMixed>(p, sum, token_of(i - 1, t), lane);
      for (int to = 0; to < ctas && lane < kStreams; ++to) {
        send(&shared.h_pre[(i - 1) % 2][t][lane], h_pre, &shared.h_pre_full[(i - 1) % 2], to);
      }
    }

    if (i < my_tiles) {
      const int stage = i % kStages;
      wait(&shared.full[stage], i / kStages % 2);
      float sums[kMixed / 8][4] = {}, squares[2][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (chunk >= chunks) break;
        uint32_t a[4];
        load_matrices(
            shared_address(shared.x[stage][stream][chunk]) + swizzled_offset(lane % 16, quarter * 2 + lane / 16), a);
#pragma unroll
        for (int group = 0; group < kMixed / 8; ++group) {
          multiply(sums[group], a, weights[chunk].high[group][0], weights[chunk].high[group][1]);
          multiply(sums[group], a, weights[chunk].low[group][0], weights[chunk].low[group][1]);
        }
        multiply(squares[0], a, a[0], a[2]);
        multiply(squares[1], a, a[1], a[3]);
      }
      const int row = lane / 4, column = lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* of_token = shared.parts[warp][row + 8 * half];
#pragma unroll
        for (int group = 0; group < kMixed / 8; ++group) {
          of_token[group * 8 + column] = sums[group][2 * half];
          of_token[group * 8 + column + 1] = sums[group][2 * half + 1];
        }
        if (column == row / 2 * 2) of_token[kMixed] = squares[half][2 * half + row % 2];
      }
    }
    __syncthreads();
    if (i < my_tiles) {
      for (int t = warp; t < kTokens; t += S::kWarps) {
        if (lane >= kSums) continue;
        float sum = 0.f;
        for (int from = 0; from < S::kWarps; ++from) sum += shared.parts[from][t][lane];
        const int owner = t / own_tokens;
        send(&shared.received[i % 2][t % own_tokens * ctas + rank][lane], sum, &shared.received_full[i % 2], owner);
      }
    }

    // Of the last tile: this CTA's columns of h_in.
    if (i > 0) {
      const int last = i - 1, stage = last % kStages;
      uint64_t* barrier = &shared.h_pre_full[last % 2];
      if (threadIdx.x == 0) arrive_and_expect(barrier, kTokens * kStreams * sizeof(float));
      wait(barrier, last / 2 % 2);
      for (int index = threadIdx.x; index < chunks * kTokens * 8; index += S::kThreads) {
        const int piece = index % 8, t = index / 8 % kTokens, chunk = index / 8 / kTokens;
        float2 out[4] = {};
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          const char* tile = reinterpret_cast<const char*>(shared.x[stage][s][chunk]);
          const uint4 words = *reinterpret_cast<const uint4*>(tile + swizzled_offset(t, piece));
          const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
          const float h_pre = shared.h_pre[last % 2][t][s];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 x = unpack(pairs[j]);
            out[j].x = fmaf(h_pre, x.x, out[j].x), out[j].y = fmaf(h_pre, x.y, out[j].y);
          }
        }
        const int64_t token = token_of(last, t);
        if (token >= p.tokens) continue;
        auto* g_out = static_cast<__nv_bfloat16*>(p.h_in) + token * p.columns + (first_chunk + chunk) * kChunk;
        reinterpret_cast<uint4*>(g_out)[piece] = {pack_bf16(out[0].x, out[0].y), pack_bf16(out[1].x, out[1].y),
                                                  pack_bf16(out[2].x, out[2].y), pack_bf16(out[3].x, out[3].y)};
      }
    }
    __syncthreads();
    // Into the stage of the last tile, which nobody reads any more.
    if (warp == 0) copy_tile(i + 2);
  }
  cute::cluster_arrive();  // nobody sends to a CTA that has gone
  cute::cluster_wait();
}

}  // namespace dsa::mhc_pre_fwd
