// Sizes, shared memory, registers and the work of a CTA of mhc_pre_fwd_kernel.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>

#include "params.h"
#include "sm90/cluster.cuh"
#include "sm90/launch.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::mhc_pre_fwd {

using namespace dsa::sm90;

inline constexpr int kTokens = 16;  // per tile
inline constexpr int kChunk = 64;   // columns of a stream per copy
inline constexpr int kMultiplyWarps = 8, kWeighWarps = 4, kGateWarps = 3, kCopyWarp = kMultiplyWarps + kWeighWarps;
inline constexpr int kMultiplyThreads = kMultiplyWarps * kWarpThreads, kWeighThreads = kWeighWarps * kWarpThreads;
inline constexpr int kThreads = kMultiplyThreads + 2 * kWarpgroupThreads;
inline constexpr int kMultiplyBarrier = 1;

template <int kStreams_>
struct Shape {
  static constexpr int kStreams = kStreams_;
  static constexpr int kWarpsPerStream = kMultiplyWarps / kStreams;
  static constexpr int kSteps = kChunk / 16 / kWarpsPerStream;  // of 16 columns, per chunk
  static constexpr int kMixed = kStreams * kStreams + 2 * kStreams;
  static constexpr int kGroups = kMixed / 8;  // of 8 columns of a product
  static constexpr int kSums = kMixed + 1;    // per token: products with phi's rows, and the sum of squares
  static constexpr int kPitch = kMixed + 2;
  // phi is copied in halves of chunks: a row of the swizzle has 128 bytes.
  static constexpr int kHalf = kSwizzleRowBytes / sizeof(float), kHalfFloats = kStreams * kMixed * kHalf;
};

// B operands of one step of 16 columns: for each 8 rows of phi, rounded part and remainder.
template <class S>
struct Weights {
  uint32_t high[S::kGroups][2], low[S::kGroups][2];
};

// Registers per thread: at launch, which is all that can be shared out, and then by role. With the most columns the
// multiply warps need more, and the others keep a few words in memory.
inline constexpr int kStart = 65536 / kThreads;
template <class S, int kChunks>
struct Registers {
  static constexpr bool kMost = sizeof(Weights<S>[kChunks][S::kSteps]) > 168 * sizeof(uint32_t);
  static constexpr int kMultiply = kMost ? 224 : 216, kWeigh = kMost ? 40 : 48, kOther = kMost ? 24 : 32;
  static_assert(2 * kMultiply + kWeigh + kOther <= 4 * kStart);
};

template <class S, int kChunks>
struct SharedStorage {
  static constexpr int kXBytes = S::kStreams * kTokens * kChunk * sizeof(__nv_bfloat16);  // of a chunk
  static constexpr int kPhiBytes = kChunk / S::kHalf * S::kHalfFloats * sizeof(float);    // of a chunk
  static constexpr int kProducts = 2 * kMultiplyWarps * kTokens * S::kPitch;
  static constexpr int kMessages = kTokens * (S::kPitch + S::kStreams);  // per stage
  static constexpr int kBarrierBytes = 1024;                             // reserved
  // Of tiles, and of their messages; more than 4 gain nothing.
  static constexpr int kStages = std::min<int>(
      (kMaxSharedBytes - kProducts * sizeof(float) - kBarrierBytes) / (kChunks * kXBytes + kMessages * sizeof(float)),
      4);
  // phi's places are where all tiles but the first will be.
  static constexpr int kXPerPhi = kPhiBytes / kXBytes;
  static constexpr int kPhiPlaces = std::min((kStages - 1) * kChunks / kXPerPhi, kChunks);
  static_assert(kPhiBytes % kXBytes == 0 && kPhiPlaces > 0);

  alignas(1024) __nv_bfloat16 x[kStages][kChunks][S::kStreams][kTokens * kChunk];
  // Each warp's sums of a token; double-buffered by tile.
  alignas(16) float products[2][kMultiplyWarps][kTokens][S::kPitch];
  // Messages: each CTA's sums of this CTA's tokens, and h_pre of all tokens from their owners.
  float sums[kStages][kTokens][S::kPitch];
  alignas(16) float h_pre[kStages][kTokens][S::kStreams];
  uint64_t full[kStages][kChunks], empty[kStages][kChunks], phi_full[kPhiPlaces], phi_empty[kPhiPlaces];

  static_assert(sizeof(full) + sizeof(empty) + sizeof(phi_full) + sizeof(phi_empty) <= kBarrierBytes);

  __device__ __forceinline__ float* phi(int place) {
    return reinterpret_cast<float*>(x[1]) + place * (kPhiBytes / sizeof(float));
  }
};

// phi's chunks take turns in its places, and the last chunk is in the last place: so the places become free in the
// order of the tiles that are copied there.
template <class S, int kChunks>
struct PhiPlaces {
  static constexpr int kCount = SharedStorage<S, kChunks>::kPhiPlaces;
  int chunks;

  __device__ __forceinline__ int of(int chunk) const { return (chunk + kCount * kChunks - chunks) % kCount; }
  // The parity of the phase of the place's barriers in which the chunk is there.
  __device__ __forceinline__ static uint32_t parity(int chunk) { return chunk / kCount % 2; }
  // The last chunk in a place; negative if there is none.
  __device__ __forceinline__ int last(int place) const { return chunks - kCount + place; }
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

}  // namespace dsa::mhc_pre_fwd
