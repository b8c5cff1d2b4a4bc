// The gates of hyper-connections and what a layer reads of the streams, for 16 tokens at a time.
//
// A cluster of CTAs shares the columns: each has a run of them, of every stream, so that it sees all that it needs for
// its part of h_in, and reads x once. phi, times gamma and split in two bf16 numbers, stays in registers: warp
// 4 * stream + quarter has a quarter of each 64 columns of that stream, as right operands, and x from shared memory is
// the left one. One more warp copies, and three make the gates: they add up the warps' sums, send them to the CTA that
// owns the token, which adds them up in a fixed order and sends h_pre to all. Meanwhile the others multiply the next
// tile, and then weigh this one, which is still there. docs/mhc.md has the maths.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>

#include "params.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warp_mma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_fwd {

using namespace dsa::sm90;

inline constexpr int kTokens = 16;  // of a tile
inline constexpr int kChunk = 64;   // columns of a stream that are copied together
inline constexpr int kStages = 3;   // a tile that comes, one that is multiplied, one that waits for its gates
inline constexpr int kPitch = 32;   // floats of a token's sums on their way
inline constexpr int kGateWarps = 3, kGateThreads = kGateWarps * kWarpThreads, kGateBarrier = 1;

template <int kStreams_>
struct Shape {
  static constexpr int kStreams = kStreams_;
  static constexpr int kWarps = 4 * kStreams, kMultiplyThreads = kWarps * kWarpThreads;
  static constexpr int kThreads = kMultiplyThreads + kWarpgroupThreads;
  // Registers of a thread: at the start, which is all that there is to share, of the others, of one that multiplies.
  static constexpr int kStart = 65536 / kThreads / 8 * 8, kOthers = 32;
  static constexpr int kMultiply = (kStart * kThreads - kOthers * kWarpgroupThreads) / kMultiplyThreads / 8 * 8;
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kGroups = kMixed / 8;  // of columns of a product
};

template <class S, int kChunks>
struct SharedStorage {
  alignas(1024) __nv_bfloat16 x[kStages][S::kStreams][kChunks][kTokens * kChunk];
  // Of each warp: its products as its lanes have them, and the sums of squares.
  alignas(16) float4 products[S::kWarps][S::kGroups][kWarpThreads];
  float squares[S::kWarps][kTokens];
  // Of tiles in turn. A token's sums: with phi's rows, and behind these of squares.
  alignas(16) float sums[2][kTokens][kPitch];      // this CTA's
  alignas(16) float received[2][kTokens][kPitch];  // of this CTA's tokens: those of each CTA of the cluster
  alignas(16) float h_pre[2][kTokens][S::kStreams];
  uint64_t full[kStages], empty[kStages], multiplied, added, received_full[2], h_pre_full[2];
};

// The tiles of a cluster, and its CTA's columns.
struct Work {
  int ctas, rank;
  int cluster, clusters;
  int tiles;                // of this cluster
  int first_chunk, chunks;  // of this CTA

  __device__ __forceinline__ Work(const Params& p, int ctas)
      : ctas(ctas), rank(cluster_rank()), cluster(blockIdx.x / ctas), clusters(gridDim.x / ctas) {
    const int all = (p.tokens - 1) / kTokens + 1, all_chunks = p.columns / kChunk;
    tiles = cluster < all ? (all - 1 - cluster) / clusters + 1 : 0;
    first_chunk = all_chunks * rank / ctas, chunks = all_chunks * (rank + 1) / ctas - first_chunk;
  }
  __device__ __forceinline__ int first_token(int i) const { return (cluster + i * clusters) * kTokens; }
  __device__ __forceinline__ int own_tokens() const { return kTokens / ctas; }  // of each tile
};

// Operands of one step of 16 columns: each 8 rows of phi, rounded, and what that leaves out.
template <class S>
struct Weights {
  uint32_t high[S::kGroups][2], low[S::kGroups][2];

  __device__ __forceinline__ void load(const Params& p, int first_column, bool exists, int lane) {
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t column = first_column + half * 8 + lane % 4 * 2;
        float2 pair{};
        if (exists) {
          const int64_t row = group * 8 + lane / 4;
          pair = *reinterpret_cast<const float2*>(p.phi + row * S::kStreams * p.columns + column);
          if (p.gamma != nullptr) pair.x *= p.gamma[column], pair.y *= p.gamma[column + 1];
        }
        high[group][half] = pack_bf16(pair.x, pair.y);
        const float2 rounded = unpack_bf16(high[group][half]);
        low[group][half] = pack_bf16(pair.x - rounded.x, pair.y - rounded.y);
      }
    }
  }
};

// The warp that copies.
template <class S, int kChunks>
__device__ __forceinline__ void copy(SharedStorage<S, kChunks>& shared, const CUtensorMap& x_map, const Work& work,
                                     int lane) {
  Ring<kStages> ring;
  const int boxes = S::kStreams * work.chunks;
  for (int i = 0; i < work.tiles; ++i) {
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) arrive_and_expect(&shared.full[ring.slot], boxes * kTokens * kChunk * 2);
    __syncwarp();
    for (int box = lane; box < boxes; box += kWarpThreads) {
      const int stream = box / work.chunks, chunk = box % work.chunks;
      tma_load_once(shared.x[ring.slot][stream][chunk], &x_map,
                    {(work.first_chunk + chunk) * kChunk, stream, 0, work.first_token(i), 0}, &shared.full[ring.slot]);
    }
    ring.advance();
  }
}

// A lane's part of the gates: lane m has the sum with row m of phi, and the one behind these that of squares.
template <class S>
struct Gates {
  int lane, part;  // 0: pre, 1: post, 2: res
  float alpha, bias;

  __device__ __forceinline__ Gates(const Params& p, int lane)
      : lane(lane),
        part(lane < S::kStreams       ? 0
             : lane < 2 * S::kStreams ? 1
                                      : 2) {
    alpha = p.alpha[part], bias = lane < S::kMixed ? p.bias[lane] : 0.f;
  }

  // Writes what the token has, and returns h_pre in the first lanes.
  __device__ __forceinline__ float make(const Params& p, float sum, int64_t token) const {
    constexpr int kStreams = S::kStreams;
    const float squares = __shfl_sync(~0u, sum, S::kMixed);
    const float inv_rms = rsqrtf(squares / (kStreams * p.columns) + p.eps);
    const float mixed = alpha * (sum * inv_rms) + bias;
    const float sigmoid = 1.f / (1.f + __expf(-mixed));
    if (token < p.tokens && lane < S::kMixed) {
      p.h_mix[token * S::kMixed + lane] = sum;
      if (lane == 0) p.inv_rms[token] = inv_rms;
      if (part == 0) p.h_pre[token * kStreams + lane] = sigmoid + p.eps;
      if (part == 1) p.h_post[token * kStreams + lane - kStreams] = 2.f * sigmoid;
      if (part == 2) p.h_res[token * kStreams * kStreams + lane - 2 * kStreams] = mixed;
    }
    return sigmoid + p.eps;
  }
};

// The warps that make gates. What is sent is not overwritten too early: a tile's h_pre comes when all have received
// what they need for it, and it is waited for before the tile after the next is multiplied.
template <class S, int kChunks>
__device__ __forceinline__ void make_gates(SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                           int warp, int lane) {
  const Gates<S> gates(p, lane);
  const int thread = warp * kWarpThreads + lane, own_tokens = work.own_tokens();
  for (int i = 0; i < work.tiles; ++i) {
    const int turn = i % 2;
    auto& sums = shared.sums[turn];
    wait(&shared.multiplied, turn);
    if (thread == 0) {  // and so the barriers' last messages, of two tiles ago, have been waited for
      arrive_and_expect(&shared.received_full[turn], kTokens * kPitch * sizeof(float));
      arrive_and_expect(&shared.h_pre_full[turn], kTokens * S::kStreams * sizeof(float));
    }
    if (warp < S::kGroups) {
      float4 sum{};
#pragma unroll 4
      for (int from = 0; from < S::kWarps; ++from) {
        const float4 product = shared.products[from][warp][lane];
        sum.x += product.x, sum.y += product.y, sum.z += product.z, sum.w += product.w;
      }
      const int row = lane / 4, column = warp * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(&sums[row][column]) = {sum.x, sum.y};
      *reinterpret_cast<float2*>(&sums[row + 8][column]) = {sum.z, sum.w};
    }
    if (warp == kGateWarps - 1 && lane < kTokens) {
      float sum = 0.f;
#pragma unroll 4
      for (int from = 0; from < S::kWarps; ++from) sum += shared.squares[from][lane];
      sums[lane][S::kMixed] = sum;
    }
    arrive(&shared.added);
    fence_async_proxy();
    asm volatile("bar.sync %0, %1;" ::"n"(kGateBarrier), "n"(kGateThreads) : "memory");
    if (thread < work.ctas) {
      bulk_send(shared.received[turn][work.rank * own_tokens], sums[thread * own_tokens],
                own_tokens * kPitch * sizeof(float), &shared.received_full[turn], thread);
    }
    wait(&shared.received_full[turn], i / 2 % 2);
    for (int own = warp; own < own_tokens; own += kGateWarps) {
      float sum = 0.f;
#pragma unroll 4
      for (int from = 0; from < work.ctas; ++from) sum += shared.received[turn][from * own_tokens + own][lane];
      const int t = work.rank * own_tokens + own;
      const float gate = gates.make(p, sum, int64_t{work.first_token(i)} + t);
      float h_pre[S::kStreams];
#pragma unroll
      for (int stream = 0; stream < S::kStreams; ++stream) h_pre[stream] = __shfl_sync(~0u, gate, stream);
      if (lane < work.ctas) send(shared.h_pre[turn][t], h_pre, &shared.h_pre_full[turn], lane);
    }
  }
}

// Of 16 tokens, a warp's columns: their products with phi, and their squares.
template <class S, int kChunks>
__device__ __forceinline__ void multiply_tile(SharedStorage<S, kChunks>& shared, int stage,
                                              const Weights<S> (&weights)[kChunks], int chunks, int warp, int lane,
                                              int parity) {
  const int stream = warp / 4, quarter = warp % 4;
  float products[S::kGroups][4] = {}, squares[2] = {};
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= chunks) break;
    uint32_t x[4];
    load_matrices(shared_address(shared.x[stage][stream][chunk]) + swizzled_offset(lane % 16, quarter * 2 + lane / 16),
                  x);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      multiply(products[group], x, weights[chunk].high[group][0], weights[chunk].high[group][1]);
      multiply(products[group], x, weights[chunk].low[group][0], weights[chunk].low[group][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) squares[i % 2] += dot_bf16(x[i], x[i]);
  }
#pragma unroll
  for (float& square : squares) {
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
  }
  wait(&shared.added, parity ^ 1);  // what the last tile left here
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group) {
    const auto& product = products[group];
    shared.products[warp][group][lane] = {product[0], product[1], product[2], product[3]};
  }
  if (lane % 4 < 2) shared.squares[warp][lane % 4 * 8 + lane / 4] = lane % 4 == 0 ? squares[0] : squares[1];
  __syncwarp();
  if (lane == 0) arrive(&shared.multiplied);
}

// This CTA's columns of h_in.
template <class S, int kChunks>
__device__ __forceinline__ void weigh_tile(SharedStorage<S, kChunks>& shared, int stage, int turn, const Params& p,
                                           const Work& work, int first_token) {
  for (int index = threadIdx.x; index < work.chunks * kTokens * 8; index += S::kMultiplyThreads) {
    const int piece = index % 8, t = index / 8 % kTokens, chunk = index / 8 / kTokens;
    float2 out[4] = {};
#pragma unroll
    for (int stream = 0; stream < S::kStreams; ++stream) {
      const char* tile = reinterpret_cast<const char*>(shared.x[stage][stream][chunk]);
      const uint4 words = *reinterpret_cast<const uint4*>(tile + swizzled_offset(t, piece));
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
      const float h_pre = shared.h_pre[turn][t][stream];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack_bf16(pairs[j]);
        out[j].x = fmaf(h_pre, x.x, out[j].x), out[j].y = fmaf(h_pre, x.y, out[j].y);
      }
    }
    if (first_token + t >= p.tokens) continue;
    auto* g_out = static_cast<__nv_bfloat16*>(p.h_in) + int64_t{first_token + t} * p.columns +
                  (work.first_chunk + chunk) * kChunk;
    reinterpret_cast<uint4*>(g_out)[piece] = {pack_bf16(out[0].x, out[0].y), pack_bf16(out[1].x, out[1].y),
                                              pack_bf16(out[2].x, out[2].y), pack_bf16(out[3].x, out[3].y)};
  }
}

template <class S, int kChunks>
__global__ void __launch_bounds__(S::kThreads, 1)
    mhc_pre_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map, int ctas) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<S, kChunks>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const Work work(p, ctas);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.empty) barrier_init(&barrier, S::kWarps);
    for (uint64_t& barrier : shared.received_full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.h_pre_full) barrier_init(&barrier, 1);
    barrier_init(&shared.multiplied, S::kWarps);
    barrier_init(&shared.added, kGateThreads);
    fence_barrier_init();
  }
  cute::cluster_arrive();
  cute::cluster_wait();  // the only one: a CTA that has all its messages has sent all that others wait for

  if (warp >= S::kWarps) {
    set_registers<S::kOthers, S::kStart>();
    if (warp == S::kWarps) {
      copy(shared, x_map, work, lane);
    } else {
      make_gates(shared, p, work, warp - S::kWarps - 1, lane);
    }
    return;
  }
  set_registers<S::kMultiply, S::kStart>();
  Weights<S> weights[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = warp / 4 * p.columns + (work.first_chunk + chunk) * kChunk + warp % 4 * 16;
    weights[chunk].load(p, column, chunk < work.chunks, lane);
  }
  Ring<kStages> multiplied, weighed;
  for (int i = 0; i <= work.tiles; ++i) {
    if (i < work.tiles) {
      wait(&shared.full[multiplied.slot], multiplied.parity);
      multiply_tile(shared, multiplied.slot, weights, work.chunks, warp, lane, i % 2);
      multiplied.advance();
    }
    if (i > 0) {
      const int last = i - 1;
      wait(&shared.h_pre_full[last % 2], last / 2 % 2);
      weigh_tile(shared, weighed.slot, last % 2, p, work, work.first_token(last));
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[weighed.slot]);
      weighed.advance();
    }
  }
}

}  // namespace dsa::mhc_pre_fwd
