// The gates of hyper-connections and a layer's input h_in, for 16 tokens at a time. Math: docs/mhc/mhc_pre.md.
//
// Warp specialization. Who does what, for a tile of 16 tokens:
//
//   role      warps  registers  does                                          waits on            signals
//   multiply  0-7    216        products with phi and squares of x            full                phi_loaded (once)
//                               sums of all 8 warps, sent as messages         named barrier       sums
//   weigh     8-11   48         h_in = sum of h_pre x, this CTA's columns     h_pre, full         empty
//   copy      12     32         loads x (TMA, one thread)                     empty, phi_loaded  full
//   gates     13-15  32         adds up all CTAs' sums; gates; h_pre is sent  sums                h_pre
//
// A cluster of CTAs splits the columns: each has a run of them, of every stream, so that it can compute its part of
// h_in, and x is read once. phi times gamma stays in the multiply warps' registers, split into two bf16 numbers; each
// warp has a part of every 64 columns of one stream. The CTA that owns a token adds up all CTAs' sums in a fixed order
// and sends h_pre to all (messages: sm90/cluster.cuh). The tile, still in shared memory, is then weighed while the next
// is multiplied.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>

#include "params.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/tma.cuh"
#include "sm90/warp_mma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_fwd {

using namespace dsa::sm90;

inline constexpr int kTokens = 16;  // per tile
inline constexpr int kChunk = 64;   // columns of a stream per copy
inline constexpr int kStages = 3;   // of tiles, and of their messages
inline constexpr int kMultiplyWarps = 8, kWeighWarps = 4, kGateWarps = 3;
inline constexpr int kMultiplyThreads = kMultiplyWarps * kWarpThreads, kWeighThreads = kWeighWarps * kWarpThreads;
inline constexpr int kThreads = kMultiplyThreads + 2 * kWarpgroupThreads;
inline constexpr int kMultiplyBarrier = 1;
// Registers per thread: at launch, which is all that can be shared out, and then by role.
inline constexpr int kStart = 65536 / kThreads, kMultiplyRegisters = 216, kWeighRegisters = 48, kOtherRegisters = 32;
static_assert(2 * kMultiplyRegisters + kWeighRegisters + kOtherRegisters <= 4 * kStart);

template <int kStreams_>
struct Shape {
  static constexpr int kStreams = kStreams_;
  static constexpr int kWarpsPerStream = kMultiplyWarps / kStreams;
  static constexpr int kSteps = kChunk / 16 / kWarpsPerStream;  // of 16 columns, per chunk
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kGroups = kMixed / 8;  // of 8 columns of a product
  static constexpr int kSums = kMixed + 1;    // per token: products with phi's rows, and the sum of squares
  static constexpr int kPitch = kMixed + 2;
};

template <class S, int kChunks>
struct SharedStorage {
  alignas(1024) __nv_bfloat16 x[kStages][kChunks][S::kStreams][kTokens * kChunk];
  // Each warp's sums of a token, ordered by column_of_row; double-buffered by tile.
  alignas(16) float products[2][kMultiplyWarps][kTokens][S::kPitch];
  // Messages: each CTA's sums of this CTA's tokens, and h_pre of all tokens from their owners.
  float sums[kStages][kTokens][S::kPitch];
  alignas(16) float h_pre[kStages][kTokens][S::kStreams];
  uint64_t full[kStages][kChunks], empty[kStages][kChunks], phi_loaded;
};

// The tiles of a cluster, and the columns of this CTA.
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
  __device__ __forceinline__ int own_tokens() const { return kTokens / ctas; }  // per tile
};

// B operands of one step of 16 columns: for each 8 rows of phi, rounded part and remainder.
template <class S>
struct Weights {
  uint32_t high[S::kGroups][2], low[S::kGroups][2];
};

// The column of a product that belongs to row `row` of phi.
__device__ __forceinline__ constexpr int column_of_row(int row) { return row / 8 * 8 + row % 4 * 2 + row / 4 % 2; }

// Issues all loads before the first is needed. A warp's load covers 16 columns of 4 rows, so that it touches few lines.
// Lanes then exchange halves, so that an even group of four lanes has the first half's rows and an odd one the second's
// (see column_of_row).
template <class S, int kChunks>
__device__ __forceinline__ void load_weights(Weights<S> (&weights)[kChunks][S::kSteps], const Params& p,
                                             const Work& work, int warp, int lane) {
  constexpr int kLoads = 2 * S::kGroups;
  const int64_t flat_columns = int64_t{S::kStreams} * p.columns;
  const int64_t column = warp / S::kWarpsPerStream * p.columns + work.first_chunk * kChunk +
                         warp % S::kWarpsPerStream * S::kSteps * 16 + lane % 8 * 2;
  const auto place = [&](int chunk, int step) { return min(chunk, work.chunks - 1) * kChunk + step * 16; };
  float2 pairs[kChunks][S::kSteps][kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float* g_row = p.phi + (i * 4 + lane / 8) * flat_columns + column;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step)
        pairs[chunk][step][i] = load_and_prefetch_256(g_row + place(chunk, step));
    }
  }
  if (p.gamma != nullptr) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const float2 gamma = load_and_prefetch_256(p.gamma + column + place(chunk, step));
#pragma unroll
        for (float2& pair : pairs[chunk][step]) pair.x *= gamma.x, pair.y *= gamma.y;
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
    for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
        uint32_t high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 pair = pairs[chunk][step][2 * group + i];
          high[i] = pack_bf16(pair.x, pair.y);
          const float2 rounded = unpack_bf16(high[i]);
          low[i] = pack_bf16(pair.x - rounded.x, pair.y - rounded.y);
        }
        exchange(high[0], high[1], weights[chunk][step].high[group]);
        exchange(low[0], low[1], weights[chunk][step].low[group]);
      }
    }
  }
}

// Producer, one thread: loads the first tile at once, and further ones after phi, which is needed first.
template <class S, int kChunks>
__device__ __forceinline__ void copy(SharedStorage<S, kChunks>& shared, const CUtensorMap& x_map, const Work& work) {
  Ring<kStages> ring;
  for (int i = 0; i < work.tiles; ++i) {
    if (i == 1) wait(&shared.phi_loaded, 0);
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      uint64_t* full = &shared.full[ring.slot][chunk];
      wait(&shared.empty[ring.slot][chunk], ring.parity ^ 1);
      arrive_and_expect(full, sizeof(shared.x[0][0]));
      tma_load_once(shared.x[ring.slot][chunk], &x_map,
                    {(work.first_chunk + chunk) * kChunk, work.first_token(i), 0, 0, 0}, full);
    }
    ring.advance();
  }
}

// A lane's part of the gates: lane m has the sum with row m of phi, and lane kMixed the sum of squares.
template <class S>
struct Gates {
  int lane, part;  // part: 0: pre, 1: post, 2: res
  float alpha, bias, share;

  __device__ __forceinline__ Gates(const Params& p, int lane)
      : lane(lane),
        part(lane < S::kStreams       ? 0
             : lane < 2 * S::kStreams ? 1
                                      : 2) {
    alpha = p.alpha[part], bias = lane < S::kMixed ? p.bias[lane] : 0.f;
    share = 1.f / (S::kStreams * p.columns);
  }

  // Computes a token's gates; `send_h_pre` receives h_pre, the others are written to global memory.
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

// The gate warps, each with some of this CTA's tokens.
template <class S, int kChunks>
__device__ __forceinline__ void make_gates(SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                           int warp, int lane) {
  const Gates<S> gates(p, lane);
  const int own_tokens = work.own_tokens();
  const uint32_t h_pre_there = remote_address(shared.h_pre, min(lane, work.ctas - 1));
  Ring<kStages> ring;
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
          sum += part, complete &= has_arrived(part);
        }
      } while (__any_sync(~0u, !complete));
      // Clear the messages before the gates are sent: h_pre tells the senders that their sums were read.
#pragma unroll 4
      for (int from = 0; from < work.ctas; ++from) clear_message(first + from * S::kPitch);
      const int t = work.rank * own_tokens + own;
      gates.make(p, sum, int64_t{work.first_token(i)} + t, [&](const auto& h_pre) {
        if (lane < work.ctas) {
          const uint32_t there = h_pre_there + (ring.slot * kTokens + t) * S::kStreams * sizeof(float);
#pragma unroll
          for (int stream = 0; stream < S::kStreams; ++stream) send_message(there + stream * 4, h_pre[stream]);
        }
      });
    }
    ring.advance();
  }
}

// A warp's columns of 16 tokens: their products with phi, and their squares.
template <class S, int kChunks>
__device__ __forceinline__ void multiply_tile(const __nv_bfloat16 (&tile)[kChunks][S::kStreams][kTokens * kChunk],
                                              uint64_t (&full)[kChunks], uint32_t parity,
                                              const Weights<S> (&weights)[kChunks][S::kSteps], int chunks,
                                              float (&sums)[kTokens][S::kPitch], int warp, int lane) {
  const int stream = warp / S::kWarpsPerStream, first_piece = warp % S::kWarpsPerStream * S::kSteps * 2;
  float products[S::kGroups][4] = {}, squares[2] = {};
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= chunks) break;
    wait(&full[chunk], parity);
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const auto& [high, low] = weights[chunk][step];
      uint32_t x[4];
      load_matrices(
          shared_address(tile[chunk][stream]) + swizzled_offset(lane % 16, first_piece + step * 2 + lane / 16), x);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) multiply(products[group], x, high[group][0], high[group][1]);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) multiply(products[group], x, low[group][0], low[group][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16(x[i]);
        squares[i % 2] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares[i % 2]));
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const token_sums = sums[lane / 4 + 8 * half];
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      *reinterpret_cast<float2*>(token_sums + group * 8 + lane % 4 * 2) = {products[group][2 * half],
                                                                           products[group][2 * half + 1]};
    }
    squares[half] += __shfl_xor_sync(~0u, squares[half], 1);
    squares[half] += __shfl_xor_sync(~0u, squares[half], 2);
    if (lane % 4 == 0) token_sums[S::kMixed] = squares[half];
  }
}

// The address to which a lane sends its sum of token `t`: the owner's place for this CTA.
template <class S, int kChunks>
__device__ __forceinline__ uint32_t place_of_sums(const SharedStorage<S, kChunks>& shared, const Work& work, int t,
                                                  int lane) {
  const int own = t % work.own_tokens(), owner = t / work.own_tokens();
  return remote_address(&shared.sums[0][own * work.ctas + work.rank][lane], owner);
}

// The multiply warps. Each also adds up all warps' sums of some tokens and sends them to the tokens' owners.
template <class S, int kChunks>
__device__ __forceinline__ void multiply_tiles(SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                               int warp, int lane) {
  constexpr int kOwn = kTokens / kMultiplyWarps;
  Weights<S> weights[kChunks][S::kSteps];
  load_weights(weights, p, work, warp, lane);
  if (lane == 0) arrive(&shared.phi_loaded);
  uint32_t places[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) places[i] = place_of_sums(shared, work, warp + i * kMultiplyWarps, lane);
  const int column = lane < S::kMixed ? column_of_row(lane) : S::kMixed;
  Ring<kStages> ring;
  for (int i = 0; i < work.tiles; ++i) {
    auto& products = shared.products[i % 2];
    multiply_tile<S, kChunks>(shared.x[ring.slot], shared.full[ring.slot], ring.parity, weights, work.chunks,
                              products[warp], warp, lane);
    sm90::sync_threads<kMultiplyBarrier, kMultiplyThreads>();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int t = warp + i * kMultiplyWarps;
      float sum = 0.f;
#pragma unroll
      for (int from = 0; from < kMultiplyWarps; ++from) sum += products[from][t][column];
      if (lane < S::kSums) send_message(places[i] + ring.slot * sizeof(shared.sums[0]), sum);
    }
    ring.advance();
  }
}

// Waits for `count` messages to this warp and returns number `lane`. Clears them.
__device__ __forceinline__ float receive(float* words, int count, int lane) {
  float* const place = words + lane % count;
  float word;
  do {
    word = read_message(place);
  } while (__any_sync(~0u, !has_arrived(word)));
  clear_message(place);
  return word;
}

// The weigh warps: this CTA's columns of h_in.
template <class S, int kChunks>
__device__ __forceinline__ void weigh_tiles(SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                            int thread) {
  constexpr int kPieces = kChunk / kPieceColumns;
  static_assert(kWeighThreads == kTokens * kPieces);
  const int piece = thread % kPieces, t = thread / kPieces;
  const int warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  Ring<kStages> ring;
  for (int i = 0; i < work.tiles; ++i) {
    constexpr int kTokensPerWarp = kTokens / kWeighWarps;
    const float gates = receive(shared.h_pre[ring.slot][warp * kTokensPerWarp], kTokensPerWarp * S::kStreams, lane);
    float h_pre[S::kStreams];
#pragma unroll
    for (int stream = 0; stream < S::kStreams; ++stream) {
      h_pre[stream] = __shfl_sync(~0u, gates, t % kTokensPerWarp * S::kStreams + stream);
    }
    const int64_t token = int64_t{work.first_token(i)} + t;
    const char* const place = reinterpret_cast<const char*>(shared.x[ring.slot]) + swizzled_offset(t, piece);
    auto* const g_out =
        static_cast<__nv_bfloat16*>(p.h_in) + token * p.columns + work.first_chunk * kChunk + piece * kPieceColumns;
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      wait(&shared.full[ring.slot][chunk], ring.parity);
      float2 out[4] = {};
#pragma unroll
      for (int stream = 0; stream < S::kStreams; ++stream) {
        const int tile = (chunk * S::kStreams + stream) * kTokens * kSwizzleRowBytes;
        const Piece piece_of_x = *reinterpret_cast<const Piece*>(place + tile);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = unpack_bf16(piece_of_x.words[j]);
          out[j].x = fmaf(h_pre[stream], x.x, out[j].x), out[j].y = fmaf(h_pre[stream], x.y, out[j].y);
        }
      }
      if (token < p.tokens) {
        *reinterpret_cast<Piece*>(g_out + chunk * kChunk) = {
            pack_bf16(out[0].x, out[0].y), pack_bf16(out[1].x, out[1].y), pack_bf16(out[2].x, out[2].y),
            pack_bf16(out[3].x, out[3].y)};
      }
      __syncwarp();  // after the stores, which wait for the reads
      if (lane == 0) arrive(&shared.empty[ring.slot][chunk]);
    }
    ring.advance();
  }
}

template <class S, int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    mhc_pre_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map, int ctas) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<S, kChunks>*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const Work work(p, ctas);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages * kChunks; ++i) {
      barrier_init(&shared.full[0][0] + i, 1), barrier_init(&shared.empty[0][0] + i, kWeighWarps);
    }
    barrier_init(&shared.phi_loaded, kMultiplyWarps);
    fence_barrier_init();
  }
  for (int i = threadIdx.x; i < kStages * kTokens * S::kPitch; i += kThreads) {
    clear_message(&shared.sums[0][0][0] + i);
    if (i < kStages * kTokens * S::kStreams) clear_message(&shared.h_pre[0][0][0] + i);
  }
  cute::cluster_arrive();
  cute::cluster_wait();  // the only one: messages are sent only to CTAs that wait for them

  if (warp < kMultiplyWarps) {
    set_registers<kMultiplyRegisters, kStart>();
    multiply_tiles(shared, p, work, warp, lane);
  } else if (warp < kMultiplyWarps + kWeighWarps) {
    set_registers<kWeighRegisters, kStart>();
    weigh_tiles(shared, p, work, threadIdx.x - kMultiplyThreads);
  } else {
    set_registers<kOtherRegisters, kStart>();
    const int other = warp - kMultiplyWarps - kWeighWarps;
    if (other == 0) {
      if (lane == 0) copy(shared, x_map, work);
    } else {
      make_gates(shared, p, work, other - 1, lane);
    }
  }
}

}  // namespace dsa::mhc_pre_fwd
