// Q of an item, in the kernel of few heads.
#pragma once

#include "narrow_storage.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/warpgroup.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

// Stores Q with the sign of the scale. Returns what sums of Q K^T are to be multiplied by, the same for all threads:
// keys are multiplied without their scales, numbers of up to 448, so sums of numbers of Q from about 2^112 on would
// overflow where the scores do not. Then Q is stored times 2^-16, which leaves such sums below 2^128.
template <int kColumns, int kHeads>
__device__ __forceinline__ float load_queries(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p,
                                              const Item& item, int thread) {
  constexpr int kPieces = kChunkColumns / kPieceColumns, kChunkPieces = kHeads * kPieces;
  constexpr int kLoads = kColumns / kPieceColumns * kHeads / kWarpgroupThreads;
  constexpr unsigned kMagnitude = 0x7fff7fffu, kLarge = 0x7680u, kOne = 0x3f80u, kDivided = 0x3780u;  // 2^110, 2^-16
  static_assert(kChunkPieces % kWarpgroupThreads == 0);
  const auto* g_q =
      static_cast<const Bf16*>(p.q) + item.b * p.q_stride_b + item.n * p.q_stride_n + item.first_head(p) * p.q_stride_h;
  const int heads_left = item.heads_left(p);
  const uint32_t s_q = shared_address(shared.q);
  uint4 pieces[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int index = i * kWarpgroupThreads + thread;
    const int chunk = index / kChunkPieces, head = index % kChunkPieces / kPieces, piece = index % kPieces;
    pieces[i] = {};
    if (head < heads_left) {
      pieces[i] = load_once(g_q + head * p.q_stride_h + chunk * kChunkColumns + piece * kPieceColumns);
    }
  }
  unsigned largest = 0;  // as a pair of bf16
#pragma unroll
  for (const uint4& v : pieces) {
    largest = __vmaxu2(largest, __vmaxu2(v.x & kMagnitude, v.y & kMagnitude));
    largest = __vmaxu2(largest, __vmaxu2(v.z & kMagnitude, v.w & kMagnitude));
  }
  const bool divides = any_of_warpgroup(kScoreBarrier, max(largest >> 16, largest & 0xffffu) >= kLarge);
  const uint32_t factor = (divides ? kDivided : kOne) | (p.negate_q ? 0x8000u : 0u), pair = factor << 16 | factor;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int index = i * kWarpgroupThreads + thread;
    const int chunk = index / kChunkPieces, head = index % kChunkPieces / kPieces, piece = index % kPieces;
    store_shared(s_q + chunk * kHeads * kSwizzleRowBytes + swizzled_offset(head, piece),
                 multiply_piece(pieces[i], pair));
  }
  return divides ? 0x1p16f : 1.f;
}

}  // namespace dsa::sparse_mla_decode
