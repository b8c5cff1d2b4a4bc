// Sparse MLA forward: one CTA walks (query, block of 64 heads) items; all 64 heads share the query's gathered keys.
//
// Who does what, for tile j of an item:
//
//   warpgroup        waits for                    does                                          signals
//   score            full_front[j], full_back[j]  S = Q K^T; softmax; P into the tile           probs_back[j-1], probs_front[j]
//   value 0 (front)  probs_front[j]               O[:, 0:256)   = O * rescale + P V;            probs_read[j]
//                                                 gathers columns [0, 256) of tile j+3          full_front[j+3]
//   value 1 (back)   probs_back[j]                O[:, 256:512) = O * rescale + P V;
//                    probs_read[j]                gathers the other columns of tile j+3         full_back[j+3]
//
// The score warpgroup holds Q in registers, so that S reads shared memory for K alone. The front values of tile j-1
// are added while S of tile j is computed; the back values wait until S is done and fill the tensor cores during the
// softmax: that is why probs_back is signalled one tile late. Each value warpgroup refills the half of a tile that it
// alone has read last, so nobody waits for an empty slot. Q travels through the same ring of slots, as a tile ahead of
// the item's keys, and O leaves through the slot of its last tile, so that consecutive items overlap.
//
// Registers: 128 of O and 24 + 8 others in the value warpgroups; 128 of Q, 32 of S and 24 + 8 others in the score one.
#pragma once

#include <cutlass/cutlass.h>

#include "config.h"
#include "params.h"
#include "sm90/gather.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::sparse_mla_fwd {

using namespace dsa::sm90;

inline constexpr int kFrontChunks = 4;  // chunks 0..3 of a tile are the front values, 4..7 the back ones
inline constexpr int kValueChunks = 8;
inline constexpr int kStepColumns = 16;      // of one wgmma
inline constexpr int kRegisterSteps = 31;    // of Q's 32 value steps; ptxas finds no room for the last
inline constexpr int kFrontBarrier = 1, kBackBarrier = 2, kScoreBarrier = 3;  // 0 is __syncthreads'
inline constexpr int kLastChunk = 8;  // key columns that are no value; then P

// Running maxima are raised only when they have fallen behind by 2^kRescaleStep, so O is rarely rescaled.
// P stays below 2^kRescaleStep, and bf16 keeps the same relative precision there.
inline constexpr float kRescaleStep = 8.f;

// The part of Q that stays in shared memory: the last 16 value columns, for which no registers are left, and the tail.
template <Config kC>
struct SharedQ {
  alignas(1024) Bf16 tail[kC.heads * tail_columns(kC)];
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};
template <Config kC>
  requires(tail_columns(kC) == 0)
struct SharedQ<kC> {
  alignas(1024) Bf16 last_step[kC.heads * kStepColumns];
};

template <Config kC>
struct SharedStorage {
  alignas(1024) Bf16 tiles[kC.stages][tile_bytes(kC) / 2];
  SharedQ<kC> q;
  uint32_t visible[kC.stages][kWarpsPerWarpgroup];  // see Feeder::feed
  uint8_t rescale[kC.stages][kC.heads];             // of O before the tile is added: the exponent bits of a power of two
  float finish[2][kC.heads];                        // of O after the last tile, for two items in turn
  int item_tiles[kC.stages];                        // with Q
  uint64_t full_front[kC.stages], full_back[kC.stages];
  uint64_t probs_written[kC.stages], probs_turn[kC.stages], probs_read[kC.stages];
  uint64_t finished[2];
};

// Where one item lies, the same for all threads.
struct Item {
  int head_block, group, s, b, split;
  int first_tile, tiles;  // at least one tile, perhaps without a visible key
  int slot_end, id_end;   // slots and ids below these are visible

  __device__ __forceinline__ Item(const Params& p, int index) {
    const int heads_per_group = p.heads / p.groups, head_blocks = ceil_div(heads_per_group, kBlockHeads);
    head_block = index % head_blocks, index /= head_blocks;
    group = index % p.groups, index /= p.groups;
    split = index % p.splits, index /= p.splits;
    s = index % p.seq_q;
    b = index / p.seq_q;
    int slots = p.topk;
    if (p.topk_length != nullptr) {
      const int length = p.topk_length[b * p.topk_length_stride_b + s * p.topk_length_stride_s];
      slots = length < 0 ? 0 : length < slots ? length : slots;
    }
    const int all_tiles = ceil_div(slots, kBlockK);
    first_tile = split * all_tiles / p.splits;
    const int end_tile = (split + 1) * all_tiles / p.splits;
    tiles = end_tile > first_tile ? end_tile - first_tile : 1;
    slot_end = end_tile * kBlockK < slots ? end_tile * kBlockK : slots;
    id_end = visible_end(p.seq_kv, p.causal, p.q_start, p.positions_per_key, s);
  }

  __device__ __forceinline__ const int* indices(const Params& p) const {
    return p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g;
  }
  // Row of [batch, seq_q, heads] of this item's first head.
  __device__ __forceinline__ int64_t first_row(const Params& p) const {
    return (static_cast<int64_t>(b) * p.seq_q + s) * p.heads + group * (p.heads / p.groups) +
           head_block * kBlockHeads;
  }
  __device__ __forceinline__ int heads_left(const Params& p) const {
    return p.heads / p.groups - head_block * kBlockHeads;
  }
};

// One value warpgroup's share of filling the ring: Q and then the kv rows of each item, three slots ahead of their use.
template <Config kC, bool kBack>
struct Feeder {
  static constexpr int kBegin = kBack ? kFrontChunks : 0, kEnd = kBack ? kC.d_qk / kChunkColumns : kFrontChunks;

  SharedStorage<kC>& shared;
  const Params& p;
  const CUtensorMap& q_map;
  const int thread;
  int index = blockIdx.x;  // of the item that comes after the tiles left
  int tiles_left = 0;
  int slots_left, id_end;
  const int* g_ids;  // this thread's first slot of the next tile
  const char* g_rows;
  int ids[kGatherRowsPerThread];  // of the next tile
  int landing = -1;               // the slot whose rows are on their way

  __device__ __forceinline__ uint64_t* full(int at) { return kBack ? &shared.full_back[at] : &shared.full_front[at]; }
  __device__ __forceinline__ int piece() const { return thread % kGatherThreadsPerRow; }
  __device__ __forceinline__ int row() const { return thread / kGatherThreadsPerRow; }

  // Tells of the rows that the last feed asked for, once they are here, and reads the ids of the next one.
  __device__ __forceinline__ void prepare() {
    if (landing >= 0) {
      wait_copies();
      fence_async_proxy();
      __syncwarp();
      if (thread % kWarpThreads == 0) arrive(full(landing));
      landing = -1;
    }
    if (tiles_left > 0) {
#pragma unroll
      for (int i = 0; i < kGatherRowsPerThread; ++i) {
        ids[i] = i * kGatherRowStep < slots_left ? __ldg(g_ids + i * kGatherRowStep) : -1;
      }
      g_ids += kBlockK;
      slots_left -= kBlockK;
    }
  }

  // Starts to fill slot `at`, prepared before. Chunk 8 is free when both value warpgroups have read it.
  __device__ __forceinline__ void feed(int at, uint32_t parity) {
    if (tiles_left > 0) {
      const uint32_t s_piece = shared_address(shared.tiles[at]) + swizzled_offset(row(), piece());
      const GatherRows rows(g_rows, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, id_end);
      rows.template copy<kBegin, kBegin + kFrontChunks>(s_piece);
      if constexpr (kBack) {
        wait(&shared.probs_read[at], parity);
        rows.template copy<kBegin + kFrontChunks, kEnd>(s_piece);
      } else {
        // Bit 8 (row % 4) + row / 16 of word row / 4 % 4.
        const uint32_t word = __ballot_sync(~0u, rows.visible >> piece() & 1);
        if (thread % kWarpThreads == 0) shared.visible[at][thread / kWarpThreads] = word;
      }
      landing = at;
      --tiles_left;
    } else if (index < p.items) {
      if constexpr (kBack) wait(&shared.probs_read[at], parity);
      const Item item(p, index);
      index += gridDim.x;
      if (thread == 0) {
        if constexpr (!kBack) shared.item_tiles[at] = item.tiles;
        arrive_and_expect(full(at), (kEnd - kBegin) * kChunkBytes);
#pragma unroll 1
        for (int chunk = kBegin; chunk < kEnd; ++chunk) {
          tma_load(shared.tiles[at] + chunk * kChunkElements, &q_map,
                   {chunk * kChunkColumns, item.head_block * kBlockHeads, item.group, item.s, item.b}, full(at));
        }
      } else if (thread % kWarpThreads == 0) {
        arrive(full(at));
      }
      tiles_left = item.tiles;
      const int first_slot = item.first_tile * kBlockK + row();
      slots_left = item.slot_end - first_slot;
      id_end = item.id_end;
      g_ids = item.indices(p) + first_slot;
      g_rows = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + item.b * p.kv_stride_b +
                                             item.group * p.kv_stride_g) +
               piece() * 16;
    }
  }
};

// Rows lane/4 and lane/4 + 8 of an accumulator, times one factor each.
template <class Accumulator>
__device__ __forceinline__ void scale_rows(Accumulator& r, const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < cute::size(r); ++i) r(i) *= factors[i / 2 % 2];
}

// Writes lse and returns the factor that turns O into the output, from the maximum (times scale) and the sum of a head's row.
__device__ __forceinline__ float finish_row(const Params& p, const Item& item, int head, float row_max,
                                            float row_sum) {
  const bool exists = head < item.heads_left(p);
  const bool empty = row_max == -INFINITY;
  float denominator = row_sum;
  if (exists && p.attn_sink != nullptr && p.splits == 1) {
    const int h = item.group * (p.heads / p.groups) + item.head_block * kBlockHeads + head;
    denominator += exp2_fast(p.attn_sink[h * p.attn_sink_stride] * kLog2E - row_max);
  }
  if (exists) {
    float* g_lse = p.splits == 1 ? p.lse : p.partial_lse + item.split * p.rows;
    g_lse[item.first_row(p) + head] = empty ? -INFINITY : kLn2 * (row_max + log2_fast(row_sum));
  }
  return empty ? 0.f : 1.f / denominator;
}

template <Config kC>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const Params& p, int thread) {
  using namespace cute;
  constexpr int kTailSteps = tail_columns(kC) / kStepColumns;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int matrix_row = warp * 16 + lane % 16, matrix_piece = lane / 16;  // of ldmatrix and stmatrix
  const int row = warp * 16 + lane / 4;                                    // and row + 8: of this thread's scores
  const uint32_t flip = p.negate_q ? 0x80008000u : 0u;

  ScoreMmaFromRegisters mma;
  ScoreMmaFromShared shared_mma;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kRegisterSteps>>{});
  Tensor r_s = partition_fragment_C(mma, Shape<_64, _64>{});
  uint32_t* q_words = reinterpret_cast<uint32_t*>(r_q.data());
  Tensor s_q_last = make_tensor(make_smem_ptr(shared.q.last_step), RowsByStep{});
  Tensor r_q_last = shared_mma.get_slice(thread).partition_fragment_A(s_q_last);
  shared_mma.accumulate_ = GMMA::ScaleOut::One;

  Ring<kC.stages> at;
  Ring<2> finish_at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    // Q: value columns into registers but for the last step, the tail into its own chunk.
    wait(&shared.full_front[at.slot], at.parity);
    wait(&shared.full_back[at.slot], at.parity);
    const int tiles = shared.item_tiles[at.slot];
    const uint32_t q_tile = shared_address(shared.tiles[at.slot]);
#pragma unroll
    for (int k = 0; k <= kRegisterSteps; ++k) {
      uint32_t words[4];
      load_matrices(q_tile + (k / 4) * kChunkBytes + swizzled_offset(matrix_row, k % 4 * 2 + matrix_piece), words);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] ^= flip;
      if (k < kRegisterSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q_words[4 * k + i] = words[i];
      } else {
        const uint32_t to = shared_address(shared.q.last_step) + matrix_row * 32 + ((matrix_piece ^ matrix_row / 4 % 2) << 4);
        store_matrices(to, words[0], words[1], words[2], words[3]);
      }
    }
    if constexpr (kTailSteps > 0) {
      const uint4* from = reinterpret_cast<const uint4*>(shared.tiles[at.slot] + kLastChunk * kChunkElements);
      uint4* to = reinterpret_cast<uint4*>(shared.q.tail);
#pragma unroll
      for (int i = thread; i < kChunkBytes / 16; i += kWarpgroupThreads) {
        const uint4 v = from[i];
        to[i] = {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip};
      }
    }
    fence_async_proxy();
    sync_warpgroup<kScoreBarrier>();
    if (lane == 0) {
      arrive(&shared.probs_written[at.slot]);
      arrive(&shared.probs_turn[at.slot]);
    }
    at.advance();

    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
    int previous_slot = 0;
    const auto signal_written = [&] {
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(&shared.probs_written[previous_slot]);
    };
    for (int j = 0; j < tiles; ++j) {
      // S = Q K^T
      Tensor s_k = make_tensor(make_smem_ptr(shared.tiles[at.slot]), RowsByColumns<kC.d_qk>{});
      Tensor r_k = mma.get_slice(thread).partition_fragment_B(s_k);
      wait(&shared.full_front[at.slot], at.parity);
      wait(&shared.full_back[at.slot], at.parity);
      warpgroup_arrive();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int k = 0; k < kRegisterSteps; ++k) {
        gemm(mma, r_q(_, _, k), r_k(_, _, k), r_s);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      gemm(shared_mma, r_q_last(_, _, 0), r_k(_, _, Int<kRegisterSteps>{}), r_s);
      if constexpr (kTailSteps > 0) {
        Tensor s_q_tail = make_tensor(make_smem_ptr(shared.q.tail), RowsByColumns<tail_columns(kC)>{});
        Tensor r_q_tail = shared_mma.get_slice(thread).partition_fragment_A(s_q_tail);
#pragma unroll
        for (int k = 0; k < kTailSteps; ++k) {
          gemm(shared_mma, r_q_tail(_, _, k), r_k(_, _, kRegisterSteps + 1 + k), r_s);
        }
      }
      warpgroup_commit_batch();
      if (j > 0) signal_written();
      // Which of this thread's columns are visible keys: bit 8 e + i is column 16 i + lane % 4 * 2 + e, plus 8 in high.
      const uint32_t low = shared.visible[at.slot][lane / 2 % 2] >> lane % 2 * 16 & 0x0f0f;
      const uint32_t high = shared.visible[at.slot][lane / 2 % 2 + 2] >> lane % 2 * 16 & 0x0f0f;
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);
      if (j > 0 && lane == 0) arrive(&shared.probs_turn[previous_slot]);
      if ((low & high) != 0x0f0f) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (!((i / 4 % 2 ? high : low) & 1u << (i % 2 * 8 + i / 8))) r_s(i) = -INFINITY;
        }
      }

      // P = 2^(S * scale - max), with a maximum that is a whole number and may lag behind
      float top[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(r_s(2 * r), r_s(2 * r + 1));
#pragma unroll
        for (int i = 2 * r + 4; i < 32; i += 4) top[r] = fmaxf(top[r], fmaxf(r_s(i), r_s(i + 1)));
        top[r] *= p.scale_log2;
      }
      int exponents[2] = {127, 127};  // of 1.f
      if (__any_sync(~0u, top[0] > row_max[0] + kRescaleStep || top[1] > row_max[1] + kRescaleStep)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
          top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
          const float raised = fmaxf(row_max[r], ceilf(top[r]));
          if (raised > row_max[r]) exponents[r] += static_cast<int>(fmaxf(row_max[r] - raised, -127.f));
          row_sum[r] *= __int_as_float(exponents[r] << 23);
          row_max[r] = raised;
        }
      }
      if (lane % 4 == 0) {
        shared.rescale[at.slot][row] = exponents[0];
        shared.rescale[at.slot][row + 8] = exponents[1];
      }
      const float base[2] = {row_max[0] == -INFINITY ? 0.f : -row_max[0], row_max[1] == -INFINITY ? 0.f : -row_max[1]};
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int r = i / 2 % 2;
        r_s(i) = exp2_fast(fmaf(r_s(i), p.scale_log2, base[r]));
        r_s(i + 1) = exp2_fast(fmaf(r_s(i + 1), p.scale_log2, base[r]));
        row_sum[r] += r_s(i) + r_s(i + 1);
      }

      // P goes to the value warpgroups in place of chunk 8, which only this warpgroup reads.
      uint32_t packed[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) packed[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
      sync_warpgroup<kScoreBarrier>();
      const uint32_t s_p = shared_address(shared.tiles[at.slot]) + kLastChunk * kChunkBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(s_p + swizzled_offset(matrix_row, 2 * i + matrix_piece), packed[4 * i], packed[4 * i + 1],
                       packed[4 * i + 2], packed[4 * i + 3]);
      }
      previous_slot = at.slot;
      at.advance();
    }
    signal_written();

    const Item item(p, index);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
      if (lane % 4 == 0) {
        shared.finish[finish_at.slot][row + 8 * r] = finish_row(p, item, row + 8 * r, row_max[r], row_sum[r]);
      }
    }
    __syncwarp();
    if (lane == 0) {
      arrive(&shared.finished[finish_at.slot]);
      arrive(&shared.probs_turn[previous_slot]);
    }
    finish_at.advance();
  }
}

template <Config kC, bool kBack>
__device__ __forceinline__ void accumulate(SharedStorage<kC>& shared, const Params& p, const CUtensorMap& q_map,
                                           const CUtensorMap& out_map, int thread) {
  using namespace cute;
  constexpr int kColumns = kFrontChunks * kChunkColumns;
  constexpr int kFirstColumn = kBack ? kColumns : 0, kFirstElement = kFirstColumn * kTileRows;
  constexpr int kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;

  ValueMma mma;
  Tensor r_o = partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});
  Feeder<kC, kBack> feeder{shared, p, q_map, thread};
  Ring<kC.stages> at;
  Ring<2> finish_at;
  // Both warpgroups have read the slot, its last chunk too: what comes three places later in the ring may arrive.
  const auto refill = [&] {
    if (!kBack && lane == 0) arrive(&shared.probs_read[at.slot]);
    feeder.feed(at.slot, at.parity);
    at.advance();
  };

  for (int i = 0; i < kC.stages; ++i) {
    feeder.prepare();
    feeder.feed(i, 1);
  }
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    wait(&shared.probs_turn[at.slot], at.parity);  // the score warpgroup has taken Q
    const int tiles = shared.item_tiles[at.slot];
    feeder.prepare();
    refill();

    mma.accumulate_ = GMMA::ScaleOut::Zero;
    for (int j = 0; j < tiles; ++j) {
      Tensor s_p = make_tensor(make_smem_ptr(shared.tiles[at.slot] + kLastChunk * kChunkElements),
                               RowsByColumns<kTileRows>{});
      Tensor s_v = make_tensor(make_smem_ptr(shared.tiles[at.slot] + kFirstElement), ColumnsByRows<kColumns>{});
      Tensor r_p = mma.get_slice(thread).partition_fragment_A(s_p);
      Tensor r_v = mma.get_slice(thread).partition_fragment_B(s_v);
      wait(&shared.probs_written[at.slot], at.parity);
      if (j > 0) {
        const int exponents[2] = {shared.rescale[at.slot][row], shared.rescale[at.slot][row + 8]};
        if (__any_sync(~0u, (exponents[0] & exponents[1]) != 127)) {
          scale_rows(r_o, {__int_as_float(exponents[0] << 23), __int_as_float(exponents[1] << 23)});
        }
      }
      wait(&shared.probs_turn[at.slot], at.parity);
      warpgroup_fence_operand(r_o);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k) {
        gemm(mma, r_p(_, _, k), r_v(_, _, k), r_o);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      feeder.prepare();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      sync_warpgroup<kBarrier>();
      if (j + 1 < tiles) refill();
    }

    wait(&shared.finished[finish_at.slot], finish_at.parity);
    const float factors[2] = {shared.finish[finish_at.slot][row], shared.finish[finish_at.slot][row + 8]};
    finish_at.advance();
    const Item item(p, index);
    scale_rows(r_o, factors);
    if (p.splits > 1) {
      const int64_t split_row = item.split * p.rows + item.first_row(p);
      float* g_out = p.partial_out + (split_row + row) * kC.d_v + kFirstColumn + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r, g_out += 8 * kC.d_v) {
        if (row + 8 * r >= item.heads_left(p)) break;
#pragma unroll
        for (int i = 2 * r; i < size(r_o); i += 4) {
          *reinterpret_cast<float2*>(g_out + i / 4 * 8) = {r_o(i), r_o(i + 1)};
        }
      }
    } else {
      // O takes the place of the values that this warpgroup alone read, in the layout that TMA stores.
      const uint32_t s_o = shared_address(shared.tiles[at.slot] + kFirstElement);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        store_matrices(s_o + i / 4 * kChunkBytes + swizzled_offset(warp * 16 + lane % 16, i % 4 * 2 + lane / 16),
                       pack_bf16(r_o(8 * i), r_o(8 * i + 1)), pack_bf16(r_o(8 * i + 2), r_o(8 * i + 3)),
                       pack_bf16(r_o(8 * i + 4), r_o(8 * i + 5)), pack_bf16(r_o(8 * i + 6), r_o(8 * i + 7)));
      }
      fence_async_proxy();
      sync_warpgroup<kBarrier>();
      if (thread == 0) {
#pragma unroll 1
        for (int chunk = 0; chunk < kFrontChunks; ++chunk) {
          tma_store(&out_map, shared.tiles[at.slot] + kFirstElement + chunk * kChunkElements,
                    {kFirstColumn + chunk * kChunkColumns, item.head_block * kBlockHeads, item.group, item.s, item.b});
        }
        tma_store_commit();
        tma_store_wait_read();
      }
      sync_warpgroup<kBarrier>();
    }
    refill();
  }
}

template <int kConfig>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_mla_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap out_map) {
  constexpr Config kC = kConfigs[kConfig];
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&out_map);
    for (int i = 0; i < kC.stages; ++i) {
      barrier_init(&shared.full_front[i], kWarpsPerWarpgroup);
      barrier_init(&shared.full_back[i], kWarpsPerWarpgroup);
      barrier_init(&shared.probs_written[i], kWarpsPerWarpgroup);
      barrier_init(&shared.probs_turn[i], kWarpsPerWarpgroup);
      barrier_init(&shared.probs_read[i], kWarpsPerWarpgroup);
    }
    for (uint64_t& barrier : shared.finished) barrier_init(&barrier, kWarpsPerWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    shrink_registers<kC.value_registers>();
    accumulate<kC, false>(shared, p, q_map, out_map, thread);
  } else if (warpgroup == 1) {
    shrink_registers<kC.value_registers>();
    accumulate<kC, true>(shared, p, q_map, out_map, thread);
  } else {
    grow_registers<kC.score_registers>();
    score<kC>(shared, p, thread);
  }
}

}  // namespace dsa::sparse_mla_fwd
