// The gates of hyper-connections and a layer's input h_in, for 16 tokens at a time. Math: docs/mhc/mhc_pre.md.
//
// Warp specialization. Who does what, for a tile of 16 tokens:
//
//   role      warps  registers   does                                          waits on          signals
//   multiply  0-7    216 or 224  phi to registers, once                        phi_full          phi_empty
//                                products with phi and squares of x            full
//                                sums of all 8 warps, sent as messages         named barrier     sums
//   weigh     8-11   48 or 40    h_in = sum of h_pre x, this CTA's columns     h_pre, full       empty
//   copy      12     32 or 24    loads phi and x (TMA, one thread)             phi_empty, empty  phi_full, full
//   gates     13-15  32 or 24    adds up all CTAs' sums; gates; h_pre is sent  sums              h_pre
//
// A cluster of CTAs splits the columns: each has a run of them, of every stream, so that it can compute its part of
// h_in, and x is read once. phi times gamma stays in the multiply warps' registers, split into two bf16 numbers; each
// warp has a part of every 64 columns of one stream. phi arrives in shared memory where the second and later tiles will
// be. The CTA that owns a token adds up all CTAs' sums in a fixed order and sends h_pre to all (messages:
// sm90/cluster.cuh). The tile, still in shared memory, is then weighed while the next is multiplied.
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
#include "storage.cuh"

namespace dsa::mhc_pre_fwd {

// A warp's part of phi, as it arrives, times gamma.
template <class S, int kChunks>
__device__ __forceinline__ void take_weights(Weights<S> (&weights)[kChunks][S::kSteps],
                                             SharedStorage<S, kChunks>& shared, const Params& p, const Work& work,
                                             int warp, int lane) {
  const int stream = warp / S::kWarpsPerStream, first = warp % S::kWarpsPerStream * S::kSteps * 16;  // of a chunk
  const int row = lane / 4, pair = lane % 4 * 2;
  const int block = (first / S::kHalf * S::kStreams + stream) * S::kMixed * kSwizzleRowBytes;
  const float* g_gamma = p.gamma + int64_t{stream} * p.columns + work.first_chunk * kChunk + first + pair;
  const PhiPlaces<S, kChunks> places{work.chunks};
  float2 gamma[kChunks][S::kSteps][2];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < 2 * S::kSteps; ++i) {
      gamma[chunk][i / 2][i % 2] = p.gamma == nullptr
                                       ? float2{1.f, 1.f}
                                       : load_and_prefetch_256(g_gamma + min(chunk, work.chunks - 1) * kChunk + i * 8);
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= work.chunks) break;
    const int place = places.of(chunk);
    wait(&shared.phi_full[place], places.parity(chunk));
    const char* const rows = reinterpret_cast<const char*>(shared.phi(place)) + block;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = first % S::kHalf + step * 16 + i * 8 + pair;
          float2 phi = *reinterpret_cast<const float2*>(rows + group * 8 * kSwizzleRowBytes +
                                                        swizzled_offset(row, column / 4) + column % 4 * sizeof(float));
          phi.x *= gamma[chunk][step][i].x, phi.y *= gamma[chunk][step][i].y;
          const uint32_t high = pack_bf16(phi.x, phi.y);
          const float2 rounded = unpack_bf16(high);
          weights[chunk][step].high[group][i] = high;
          weights[chunk][step].low[group][i] = pack_bf16(phi.x - rounded.x, phi.y - rounded.y);
        }
      }
    }
    fence_async_proxy();  // the reads are complete before a copy takes the place
    __syncwarp();
    if (lane == 0) arrive(&shared.phi_empty[place]);
  }
}

// Producer, one thread: phi and the first tile, then the other tiles, which wait for phi to leave their places.
template <class S, int kChunks>
__device__ __forceinline__ void copy(SharedStorage<S, kChunks>& shared, const CUtensorMap& x_map,
                                     const CUtensorMap& phi_map, const Work& work) {
  using Storage = SharedStorage<S, kChunks>;
  const PhiPlaces<S, kChunks> places{work.chunks};
  const auto copy_phi = [&](int chunk) {
    const int place = places.of(chunk);
    uint64_t* full = &shared.phi_full[place];
    wait(&shared.phi_empty[place], places.parity(chunk) ^ 1);
    arrive_and_expect(full, Storage::kPhiBytes);
    for (int half = 0; half < kChunk / S::kHalf; ++half) {
      const int first_column = (work.first_chunk + chunk) * kChunk + half * S::kHalf;
      tma_load(shared.phi(place) + half * S::kHalfFloats, &phi_map, {first_column * int(sizeof(float)), 0, 0, 0, 0},
               full);
    }
  };
  const auto copy_x = [&](int slot, int chunk, int first_token) {
    uint64_t* full = &shared.full[slot][chunk];
    arrive_and_expect(full, Storage::kXBytes);
    tma_load_once(shared.x[slot][chunk], &x_map, {(work.first_chunk + chunk) * kChunk, first_token, 0, 0, 0}, full);
  };
  for (int chunk = 0; chunk < work.chunks; ++chunk) {
    copy_phi(chunk);
    copy_x(0, chunk, work.first_token(0));
  }
  Ring<Storage::kStages> ring;
  for (int i = 1; i < work.tiles; ++i) {
    ring.advance();
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      if (i < Storage::kStages) {
        const int place = ((i - 1) * kChunks + chunk) / Storage::kXPerPhi;
        const int last = place < places.kCount ? places.last(place) : -1;
        if (last >= 0) wait(&shared.phi_empty[place], places.parity(last));
      }
      wait(&shared.empty[ring.slot][chunk], ring.parity ^ 1);
      copy_x(ring.slot, chunk, work.first_token(i));
    }
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
  Ring<SharedStorage<S, kChunks>::kStages> ring;
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
  take_weights(weights, shared, p, work, warp, lane);
  uint32_t places[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) places[i] = place_of_sums(shared, work, warp + i * kMultiplyWarps, lane);
  Ring<SharedStorage<S, kChunks>::kStages> ring;
  for (int i = 0; i < work.tiles; ++i) {
    auto& products = shared.products[i % 2];
    multiply_tile<S, kChunks>(shared.x[ring.slot], shared.full[ring.slot], ring.parity, weights, work.chunks,
                              products[warp], warp, lane);
    sm90::sync_threads<kMultiplyBarrier, kMultiplyThreads>();
    float own_sums[kOwn] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int from = 0; from < kMultiplyWarps; ++from) {
        own_sums[i] += products[from][warp + i * kMultiplyWarps][min(lane, S::kMixed)];
      }
    }
    if (lane < S::kSums) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) send_message(places[i] + ring.slot * sizeof(shared.sums[0]), own_sums[i]);
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
  Ring<SharedStorage<S, kChunks>::kStages> ring;
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
    mhc_pre_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap phi_map, int ctas) {
  using Storage = SharedStorage<S, kChunks>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(shared_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0), lane = threadIdx.x % kWarpThreads;
  const Work work(p, ctas);
  if (warp == kCopyWarp && lane == 0) {
    for (int i = 0; i < Storage::kStages * kChunks; ++i) {
      barrier_init(&shared.full[0][0] + i, 1), barrier_init(&shared.empty[0][0] + i, kWeighWarps);
    }
    for (int i = 0; i < Storage::kPhiPlaces; ++i) {
      barrier_init(&shared.phi_full[i], 1), barrier_init(&shared.phi_empty[i], kMultiplyWarps);
    }
    fence_barrier_init();
  }
  for (int i = threadIdx.x; i < Storage::kStages * kTokens * S::kPitch; i += kThreads) {
    clear_message(&shared.sums[0][0][0] + i);
    if (i < Storage::kStages * kTokens * S::kStreams) clear_message(&shared.h_pre[0][0][0] + i);
  }
  // The only barrier of the cluster: messages are sent to CTAs that have marked their words as empty. Copies need not
  // wait for it. (There are at least two CTAs: without a cluster, this wait would become one for all threads.)
  cute::cluster_arrive();
  if (warp != kCopyWarp) cute::cluster_wait();

  if (warp < kMultiplyWarps) {
    set_registers<Registers<S, kChunks>::kMultiply, kStart>();
    multiply_tiles(shared, p, work, warp, lane);
  } else if (warp < kMultiplyWarps + kWeighWarps) {
    set_registers<Registers<S, kChunks>::kWeigh, kStart>();
    weigh_tiles(shared, p, work, threadIdx.x - kMultiplyThreads);
  } else {
    set_registers<Registers<S, kChunks>::kOther, kStart>();
    if (warp == kCopyWarp) {
      if (lane == 0) copy(shared, x_map, phi_map, work);
      __syncwarp();
      cute::cluster_wait();
    } else {
      make_gates(shared, p, work, warp - kCopyWarp - 1, lane);
    }
  }
}

}  // namespace dsa::mhc_pre_fwd
