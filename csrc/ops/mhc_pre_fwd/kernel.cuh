// The gates of hyper-connections and what a layer reads of the streams, for 16 tokens at a time.
//
// A cluster of CTAs shares the columns: each has a run of them, of every stream, so that it sees all that it needs for
// its part of h_in, and reads x once. phi, times gamma and split in two bf16 numbers, stays in registers: warp
// 4 * stream + quarter has a quarter of each 64 columns of that stream, as right operands, and x from shared memory is
// the left one. The warps add up each other's sums, a token a warp, and send them to the CTA that owns the token. There
// more warps add up what all CTAs have sent, in a fixed order, make the gates, and send h_pre to all, while the next
// tile is multiplied; then this one, which is still there, is weighed. docs/mhc.md has the maths.
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
inline constexpr int kTurns = 3;    // of messages: what is read of a tile is put back before those of the next are sent
inline constexpr int kGateWarps = 3;
inline constexpr int kMultiplyBarrier = 1;

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
  static constexpr int kSums = kMixed + 1;    // of a token: with phi's rows, and of squares
  static constexpr int kPitch = kMixed + 2;
};

template <class S, int kChunks>
struct SharedStorage {
  alignas(1024) __nv_bfloat16 x[kStages][S::kStreams][kChunks][kTokens * kChunk];
  alignas(16) float products[S::kWarps][kTokens][S::kPitch];  // a token's sums, of each warp, by column_of_row
  // Messages, of tiles in turn: sums of this CTA's tokens from each CTA of the cluster, and h_pre of all tokens from
  // their owners.
  float sums[kTurns][kTokens][S::kPitch];
  alignas(16) float h_pre[kTurns][kTokens][S::kStreams];
  uint64_t full[kStages], empty[kStages], added;
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
};

// ld.global with 256 bytes around it in L2, where other warps will find what they need
__device__ __forceinline__ float2 load_with_neighbours(const float* g) {
  float2 r;
  asm volatile("ld.global.nc.L2::256B.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(g));
  return r;
}

// Which column of a product is with row `row` of phi.
__device__ __forceinline__ constexpr int column_of_row(int row) { return row / 8 * 8 + row % 4 * 2 + row / 4 % 2; }

// All loads are under way before the first is needed. A warp's load has 16 columns of 4 rows, so that it touches few
// lines; lanes then exchange halves of them, such that an even group of four has the first half's rows and an odd one
// the second's (see column_of_row).
template <class S, int kChunks>
__device__ __forceinline__ void load_weights(Weights<S> (&weights)[kChunks], const Params& p, const Work& work,
                                             int warp, int lane) {
  const int64_t flat_columns = int64_t{S::kStreams} * p.columns;
  const int64_t column = warp / 4 * p.columns + work.first_chunk * kChunk + warp % 4 * 16 + lane % 8 * 2;
  float2 pairs[kChunks][S::kGroups][2];
#pragma unroll
  for (int i = 0; i < 2 * S::kGroups; ++i) {
    const float* g_row = p.phi + (i * 4 + lane / 8) * flat_columns + column;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      pairs[chunk][i / 2][i % 2] = load_with_neighbours(g_row + min(chunk, work.chunks - 1) * kChunk);
    }
  }
  if (p.gamma != nullptr) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float2 gamma = load_with_neighbours(p.gamma + column + min(chunk, work.chunks - 1) * kChunk);
#pragma unroll
      for (int i = 0; i < 2 * S::kGroups; ++i) {
        pairs[chunk][i / 2][i % 2].x *= gamma.x, pairs[chunk][i / 2][i % 2].y *= gamma.y;
      }
    }
  }
  const bool odd = lane / 4 % 2;
  const auto exchange = [&](uint32_t first, uint32_t second, uint32_t (&halves)[2]) {
    const uint32_t others = __shfl_xor_sync(~0u, odd ? first : second, 4);
    halves[0] = odd ? others : first, halves[1] = odd ? second : others;
  };
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 pair = pairs[chunk][group][i];
        high[i] = pack_bf16(pair.x, pair.y);
        const float2 rounded = unpack_bf16(high[i]);
        low[i] = pack_bf16(pair.x - rounded.x, pair.y - rounded.y);
      }
      exchange(high[0], high[1], weights[chunk].high[group]);
      exchange(low[0], low[1], weights[chunk].low[group]);
    }
  }
}

// The warp that copies: the first tile at once, and others when phi is here, which is needed first.
template <class S, int kChunks>
__device__ __forceinline__ void copy(SharedStorage<S, kChunks>& shared, const CUtensorMap& x_map, const Work& work,
                                     int lane) {
  static_assert(S::kStreams * kChunks <= kWarpThreads);
  const int boxes = S::kStreams * work.chunks, stream = lane / work.chunks, chunk = lane % work.chunks;
  Ring<kStages> ring;
  for (int i = 0; i < work.tiles; ++i) {
    if (i > 0) wait(&shared.empty[ring.slot], ring.parity);
    if (lane == 0) arrive_and_expect(&shared.full[ring.slot], boxes * kTokens * kChunk * 2);
    __syncwarp();
    if (lane < boxes) {
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
  float alpha, bias, share;

  __device__ __forceinline__ Gates(const Params& p, int lane)
      : lane(lane),
        part(lane < S::kStreams       ? 0
             : lane < 2 * S::kStreams ? 1
                                      : 2) {
    alpha = p.alpha[part], bias = lane < S::kMixed ? p.bias[lane] : 0.f;
    share = 1.f / (S::kStreams * p.columns);
  }

  // What the token has, of which `send_h_pre` gets h_pre, and the rest is written.
  template <class Send>
  __device__ __forceinline__ void make(const Params& p, float sum, int64_t token, Send&& send_h_pre) const {
    constexpr int kStreams = S::kStreams;
    const float inv_rms = rsqrtf(fmaf(__shfl_sync(~0u, sum, S::kMixed), share, p.eps));
    const float mixed = fmaf(alpha, sum * inv_rms, bias);
    const float sigmoid = __fdividef(1.f, 1.f + __expf(-mixed)), gate = sigmoid + p.eps;
    float h_pre[kStreams];
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) h_pre[stream] = __shfl_sync(~0u, gate, stream);
    send_h_pre(h_pre);
    if (token >= p.tokens || lane >= S::kMixed) return;
    p.h_mix[token * S::kMixed + lane] = sum;
    if (lane == 0) p.inv_rms[token] = inv_rms;
    if (part == 0) p.h_pre[token * kStreams + lane] = gate;
    if (part == 1) p.h_post[token * kStreams + lane - kStreams] = 2.f * sigmoid;
    if (part == 2) p.h_res[token * kStreams * kStreams + lane - 2 * kStreams] = mixed;
  }
};

// The warps that make gates, each of some of this CTA's tokens.
template <class S, int kChunks>
__device__ __forceinline__ void make_gates(SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                           int warp, int lane) {
  const Gates<S> gates(p, lane);
  const int own_tokens = work.own_tokens();
  const uint32_t h_pre_there = remote_address(shared.h_pre, min(lane, work.ctas - 1));
  Ring<kTurns> ring;
  for (int i = 0; i < work.tiles; ++i) {
    for (int own = warp; own < own_tokens; own += kGateWarps) {
      float* const first = &shared.sums[ring.slot][own * work.ctas][min(lane, S::kMixed)];
      float sum;
      bool complete;
      do {
        sum = 0.f, complete = true;
#pragma unroll 4
        for (int from = 0; from < work.ctas; ++from) {
          const float part = read_message(first + from * S::kPitch);
          sum += part, complete &= has_come(part);
        }
      } while (__any_sync(~0u, !complete));
      const int t = work.rank * own_tokens + own;
      gates.make(p, sum, int64_t{work.first_token(i)} + t, [&](const auto& h_pre) {
        if (lane < work.ctas) {
          const uint32_t there = h_pre_there + (ring.slot * kTokens + t) * S::kStreams * sizeof(float);
#pragma unroll
          for (int stream = 0; stream < S::kStreams; ++stream) send_message(there + stream * 4, h_pre[stream]);
        }
#pragma unroll 4
        for (int from = 0; from < work.ctas; ++from) clear_message(first + from * S::kPitch);
      });
    }
    ring.advance();
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
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(x[i]);
      squares[i % 2] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares[i % 2]));
    }
  }
  wait(&shared.added, parity ^ 1);  // what the last tile left here
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const of_token = shared.products[warp][lane / 4 + 8 * half];
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      *reinterpret_cast<float2*>(of_token + group * 8 + lane % 4 * 2) = {products[group][2 * half],
                                                                         products[group][2 * half + 1]};
    }
    squares[half] += __shfl_xor_sync(~0u, squares[half], 1);
    squares[half] += __shfl_xor_sync(~0u, squares[half], 2);
    if (lane % 4 == 0) of_token[S::kMixed] = squares[half];
  }
}

// Where a lane sends its sum of token `t`: the owner's place for what this CTA has.
template <class S, int kChunks>
__device__ __forceinline__ uint32_t place_of_sums(const SharedStorage<S, kChunks>& shared, const Work& work, int t,
                                                  int lane) {
  const int own = t % work.own_tokens(), owner = t / work.own_tokens();
  return remote_address(&shared.sums[0][own * work.ctas + work.rank][lane], owner);
}

// Adds up what the warps have of this one's tokens, and sends it to the tokens' owners, who will send h_pre.
template <class S, int kChunks>
__device__ __forceinline__ void send_sums(SharedStorage<S, kChunks>& shared,
                                          const uint32_t (&places)[kTokens / S::kWarps], int turn, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kTokens / S::kWarps; ++i) {
    const int t = warp + i * S::kWarps;
    if (lane < S::kStreams) clear_message(&shared.h_pre[turn][t][lane]);  // all have read it
    __syncwarp();
    const int column = lane < S::kMixed ? column_of_row(lane) : S::kMixed;
    float sum = 0.f;
#pragma unroll
    for (int from = 0; from < S::kWarps; ++from) sum += shared.products[from][t][column];
    if (lane < S::kSums) send_message(places[i] + turn * sizeof(shared.sums[0]), sum);
  }
  __syncwarp();
  if (lane == 0) arrive(&shared.added);
}

template <class S, int kChunks>
__device__ __forceinline__ void wait_for_gates(SharedStorage<S, kChunks>& shared, int turn, int lane) {
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < kTokens * S::kStreams; i += kWarpThreads) {
      complete &= has_come(read_message(&shared.h_pre[turn][0][0] + i + lane));
    }
  } while (__any_sync(~0u, !complete));
}

// This CTA's columns of h_in.
template <class S, int kChunks>
__device__ __forceinline__ void weigh_tile(SharedStorage<S, kChunks>& shared, int stage, const Params& p,
                                           const Work& work, int first_token) {
  constexpr int kPieces = kChunk / 8, kStep = S::kMultiplyThreads / (kTokens * kPieces);
  const int piece = threadIdx.x % kPieces, t = threadIdx.x / kPieces % kTokens;
  if (first_token + t >= p.tokens) return;
  float h_pre[S::kStreams];
#pragma unroll
  for (int stream = 0; stream < S::kStreams; ++stream) h_pre[stream] = shared.h_pre[stage][t][stream];
  const char* const place = reinterpret_cast<const char*>(shared.x[stage][0][0]) + swizzled_offset(t, piece);
  auto* const g_out = static_cast<__nv_bfloat16*>(p.h_in) + int64_t{first_token + t} * p.columns +
                      work.first_chunk * kChunk + piece * 8;
  for (int chunk = threadIdx.x / (kPieces * kTokens); chunk < work.chunks; chunk += kStep) {
    float2 out[4] = {};
#pragma unroll
    for (int stream = 0; stream < S::kStreams; ++stream) {
      const int tile = (stream * kChunks + chunk) * kTokens * kSwizzleRowBytes;
      const uint4 words = *reinterpret_cast<const uint4*>(place + tile);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack_bf16(pairs[j]);
        out[j].x = fmaf(h_pre[stream], x.x, out[j].x), out[j].y = fmaf(h_pre[stream], x.y, out[j].y);
      }
    }
    *reinterpret_cast<uint4*>(g_out + chunk * kChunk) = {pack_bf16(out[0].x, out[0].y), pack_bf16(out[1].x, out[1].y),
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
    barrier_init(&shared.added, S::kWarps);
    fence_barrier_init();
  }
  for (int i = threadIdx.x; i < kTurns * kTokens * S::kPitch; i += S::kThreads) {
    clear_message(&shared.sums[0][0][0] + i);
    if (i < kTurns * kTokens * S::kStreams) clear_message(&shared.h_pre[0][0][0] + i);
  }
  cute::cluster_arrive();
  cute::cluster_wait();  // the only one: nothing is sent to a CTA that does not wait for it

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
  load_weights(weights, p, work, warp, lane);
  if (lane == 0) {
    for (uint64_t& barrier : shared.empty) arrive(&barrier);
  }
  uint32_t places[kTokens / S::kWarps];
#pragma unroll
  for (int i = 0; i < kTokens / S::kWarps; ++i) places[i] = place_of_sums(shared, work, warp + i * S::kWarps, lane);
  static_assert(kTurns == kStages);
  Ring<kStages> multiplied, weighed;  // of stages, and of turns
  for (int i = 0; i <= work.tiles; ++i) {
    if (i < work.tiles) {
      wait(&shared.full[multiplied.slot], multiplied.parity);
      multiply_tile(shared, multiplied.slot, weights, work.chunks, warp, lane, i % 2);
      asm volatile("bar.sync %0, %1;" ::"n"(kMultiplyBarrier), "n"(S::kMultiplyThreads) : "memory");
      send_sums(shared, places, multiplied.slot, warp, lane);
      multiplied.advance();
    }
    if (i > 0) {
      wait_for_gates(shared, weighed.slot, lane);
      weigh_tile(shared, weighed.slot, p, work, work.first_token(i - 1));
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[weighed.slot]);
      weighed.advance();
    }
  }
}

}  // namespace dsa::mhc_pre_fwd
