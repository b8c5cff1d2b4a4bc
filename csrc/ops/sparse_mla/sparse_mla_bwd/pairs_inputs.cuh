// Shared memory of a pair of CTAs, and what they load besides keys.
#pragma once

#include "score.cuh"
#include "sm90/cluster.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kPairHeads = 2 * kBlockHeads;
inline constexpr int kPairThreads = 4 * kWarpgroupThreads;
inline constexpr int kPartChunks = 2, kRingSlots = 3;                                          // of the ring of keys
inline constexpr int kBlockChunk = kBlockHeads * kChunkColumns, kPairChunk = 2 * kBlockChunk;  // elements
inline constexpr int kProbsBytes = kBlockHeads * kBlockK * sizeof(Bf16);
inline constexpr int kScoreRegisters = 224, kAddRegisters = 112, kGatherRegisters = 56, kRegistersAtLaunch = 128;
static_assert(kScoreRegisters + 2 * kAddRegisters + kGatherRegisters <= 4 * kRegistersAtLaunch);

template <int kQk>
struct PairStorage {
  static constexpr int kQChunks = kHalfChunks + (kQk > 512);
  static constexpr int kParts = (kQk / kChunkColumns + kPartChunks - 1) / kPartChunks;  // of a tile
  alignas(1024) Bf16 q[kQChunks * kPairChunk];  // chunks of 128 heads: this CTA's half of the columns, and the tail
  alignas(1024) Bf16 dout[kHalfChunks * kPairChunk];
  alignas(1024) Bf16 keys[kRingSlots][kPartChunks * kChunkElements];
  alignas(1024) Bf16 probs[2][kBlockHeads * kBlockK];  // of both blocks of heads
  alignas(1024) Bf16 dscores[2][kBlockHeads * kBlockK];
  int ids[kIdSlots][kBlockK];     // of a tile's keys, -1 for none
  uint32_t visible[kIdSlots][4];  // see publish_visible
  float dots[kBlockHeads];        // sum(dO * O) of the own block's rows
  uint64_t inputs_full, dots_full, ring_full[kRingSlots], ring_free[kRingSlots], probs_full, probs_free;
  alignas(128) Bf16 ones[kOnes];  // only used by instances that write sums of P
};

// Loads this CTA's half of the columns of Q and dO, of all heads, and the tail of Q. Called by one thread.
template <int kQk>
__device__ __forceinline__ void load_halves(PairStorage<kQk>& shared, const Maps& maps, HeadTile at, int rank) {
  expect_bytes(&shared.inputs_full, sizeof(shared.q) + sizeof(shared.dout));
#pragma unroll 1
  for (int i = 0; i < PairStorage<kQk>::kQChunks; ++i) {
    at.column = (i < kHalfChunks ? rank * kHalfChunks + i : kTailChunk) * kChunkColumns;
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
      const int to = i * kPairChunk + block * kBlockChunk;
      at.head = block * kBlockHeads;
      tma_load(shared.q + to, &maps.q, at, &shared.inputs_full);
      if (i < kHalfChunks) tma_load(shared.dout + to, &maps.dout, at, &shared.inputs_full);
    }
  }
  arrive(&shared.inputs_full);
}

// Rows [row, row + 8] of a block of heads as fragments of wgmma, 256 columns from g_first on. Four lanes load 32
// columns of a row at once and exchange words.
__device__ __forceinline__ void load_fragments(const Bf16* g_first, int64_t stride, int heads, int row, int lane,
                                               uint32_t* words) {
  constexpr int kPairs = kHalfChunks * kChunkColumns / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = row + 8 * r;
    const Bf16* g_row = g_first + head * stride + lane % 4 * kPieceColumns;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint4 v{};
      if (head < heads) v = *reinterpret_cast<const uint4*>(g_row + i * 32);
      Piece piece{v.x, v.y, v.z, v.w};
      transpose_in_quads(piece, lane);
#pragma unroll
      for (int m = 0; m < 4; ++m) words[4 * (2 * i + m / 2) + r + m % 2 * 2] = piece.words[m];
    }
  }
}

// sum(dO * O) of the own block's rows, eight of them by each warp of the gradient warpgroups.
template <int kQk>
__device__ __forceinline__ void write_dots(PairStorage<kQk>& shared, const Params& p, const Item& item, int warp,
                                           int lane) {
  constexpr int kRows = kBlockHeads / (2 * kWarpsPerWarpgroup), kPieces = 512 / kPieceColumns / kWarpThreads;
#pragma unroll 2
  for (int i = 0; i < kRows; ++i) {
    const int row = warp * kRows + i;
    const int64_t at = item.row(p, item.has(p, row) ? row : 0) * p.d_v;
    const auto* g_out = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.out) + at) + lane;
    const auto* g_dout = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.dout) + at) + lane;
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint4 a = __ldg(g_out + n * kWarpThreads), b = __ldg(g_dout + n * kWarpThreads);
      sum += dot_bf16(a.x, b.x) + dot_bf16(a.y, b.y) + dot_bf16(a.z, b.z) + dot_bf16(a.w, b.w);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) shared.dots[row] = sum;
  }
  __syncwarp();
  if (lane == 0) arrive(&shared.dots_full);
}

// Brings half of the inputs of the item that probably comes next on this SM to L2. One thread per head.
__device__ __forceinline__ void prefetch_inputs(const Params& p, int pair, int rank, int thread) {
  if (pair >= static_cast<int>(gridDim.x) / 2 || thread >= kBlockHeads) return;
  const Item item = Item::of_pair(p, pair, rank);
  if (thread >= item.heads_left(p)) return;
  const int64_t row = item.row(p, thread) * p.d_v;
  prefetch_l2(static_cast<const Bf16*>(p.q) + item.b * p.q_stride_b + item.s * p.q_stride_s +
                  item.head(p, thread) * p.q_stride_h,
              p.d_qk * int(sizeof(Bf16)));
  prefetch_l2(static_cast<const Bf16*>(p.dout) + row, p.d_v * int(sizeof(Bf16)));
  prefetch_l2(static_cast<const Bf16*>(p.out) + row, p.d_v * int(sizeof(Bf16)));
}

}  // namespace dsa::sparse_mla_bwd
