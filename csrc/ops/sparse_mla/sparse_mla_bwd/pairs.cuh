// Sparse MLA backward of more than 64 heads: a pair of CTAs (a cluster of 2) takes a query's group, over all its keys
// or a part of them (split items). Each scores one block of 64 heads and adds half of the columns of dkv, of all heads:
// half as many additions as with a CTA for each block. For that the CTAs send each other P and dS, which are small.
// In a deterministic call, one row per slot is stored instead, of all heads. There is no room for accumulators of dQ:
// dS is stored, and dq_kernel (pairs_dq.cuh) multiplies it by the keys.
//
// Warp specialization: four warpgroups. Who does what, for tile j of 64 keys:
//
//   role        warpgroup  registers  does                                    waits on               signals
//   score       0          224        loads Q and dO (TMA, one thread)                               inputs_full
//                                     S = Q K^T, dP = dO V^T; P, dS           inputs_full, dots_full
//                                                                             (once), ring_full      ring_free
//                                     stores and sends them                   probs_free of j-1      probs_full of both
//   gradients   1, 2       112        sum(dO * O) of the own block                                   dots_full
//                                     its columns of dkv = P^T dO + dS^T Q    inputs_full (once),
//                                                                             probs_full             probs_free of both
//                                     the first: sums of P over own heads
//   gather      3          56         keys, in parts of two chunks            ring_free              ring_full
//
// Shared memory holds Q and dO of all heads for this CTA's half of the columns, and the tail of Q. The other half of
// the columns of the CTA's own block, which only S and dP need, is in the score warpgroup's registers.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>

#include "pairs_inputs.cuh"

namespace dsa::sparse_mla_bwd {

// The score warpgroup's part in a tile without visible keys, which both CTAs skip, as they read the same list. Its dS
// is not written: dq_kernel skips the same tiles.
template <int kQk>
__device__ __forceinline__ void skip_tile(PairStorage<kQk>& shared, Ring<kRingSlots>& ring, uint32_t parity,
                                          int thread) {
#pragma unroll 1
  for (int part = 0; part < PairStorage<kQk>::kParts; ++part) {
    wait(&shared.ring_full[ring.slot], ring.parity);
    __syncwarp();  // no lane may find a later phase
    if (thread % kWarpThreads == 0) arrive(&shared.ring_free[ring.slot]);
    ring.advance();
  }
  if (thread == 0) arrive(&shared.probs_free);
  wait(&shared.probs_free, parity);
  sync_warpgroup<kScoreBarrier>();  // all have seen this phase, before the next one can be complete
  if (thread == 0) arrive(&shared.probs_full);
}

// P and dS of the own block are in shared memory: sends them to the peer, and stores dS. By three warps, since all of
// the warpgroup waits until these copies have been issued.
template <int kQk>
__device__ __forceinline__ void publish_scores(PairStorage<kQk>& shared, char* g_dscores, int rank, int thread) {
  fence_async_proxy();
  sync_warpgroup<kScoreBarrier>();
  if (thread % kWarpThreads == 0) {
    const int warp = thread / kWarpThreads, peer = rank ^ 1;
    const uint32_t full = remote_address(&shared.probs_full, peer);
    if (warp == 0) {
      arrive_and_expect(&shared.probs_full, 2 * kProbsBytes);
      bulk_store(g_dscores, shared.dscores[rank], kProbsBytes);
      tma_store_commit();
    } else if (warp == 1) {
      bulk_send(remote_address(shared.probs[rank], peer), shared.probs[rank], kProbsBytes, full);
    } else if (warp == 2) {
      bulk_send(remote_address(shared.dscores[rank], peer), shared.dscores[rank], kProbsBytes, full);
    }
  }
  __syncwarp();
}

// In CTA kRank of the cluster. Columns are multiplied in their order, as in the forward pass: so S has the same bits,
// and P, from the lse of the forward pass, is right for any magnitude of scores.
template <int kQk, int kRank>
__device__ __forceinline__ void score_pair(PairStorage<kQk>& shared, const Params& p, const Item& item,
                                           const Maps& maps, int thread) {
  using namespace cute;
  constexpr int kChunks = kQk / kChunkColumns, kSteps = kChunkColumns / 16, kParts = PairStorage<kQk>::kParts;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  const ItemPlace place = item.place(p);
  if (thread == 0) load_halves(shared, maps, place.heads, kRank);
  const int heads = item.heads_left(p), other = (kRank ^ 1) * kHalfChunks * kChunkColumns;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kHalfChunks * kSteps>>{});
  Tensor r_do = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kHalfChunks * kSteps>>{});
  load_fragments(static_cast<const Bf16*>(p.q) + item.b * p.q_stride_b + item.s * p.q_stride_s +
                     item.head(p, 0) * p.q_stride_h + other,
                 p.q_stride_h, heads, row, lane, reinterpret_cast<uint32_t*>(r_q.data()));
  load_fragments(static_cast<const Bf16*>(p.dout) + item.row(p, 0) * p.d_v + other, p.d_v, heads, row, lane,
                 reinterpret_cast<uint32_t*>(r_do.data()));
  RowFactors rows[2] = {{p, item, row}, {p, item, row + 8}};
  wait(&shared.dots_full, 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) rows[r].subtract_output_dot(p, item, row + 8 * r, shared.dots[row + 8 * r], lane);
  const float scale_log2 = p.sm_scale * kLog2E;
  ScoreMmaFromRegisters register_mma;
  ScoreMmaFromShared shared_mma;
  Tensor r_s = partition_fragment_C(register_mma, Shape<_64, _64>{});
  Tensor r_dp = partition_fragment_C(register_mma, Shape<_64, _64>{});
  char* g_dscores = static_cast<char*>(p.dscores) + item.first_dscores * (2 * kProbsBytes) + kRank * kProbsBytes;
  if (p.finished != nullptr) {
    if (thread == 0) wait_for_earlier_waves(p);
    sync_warpgroup<kScoreBarrier>();
  }
  wait(&shared.inputs_full, 0);
  Ring<kRingSlots> ring;
#pragma unroll 1
  for (int j = 0; j < item.tiles; ++j) {
    const uint32_t parity = j % 2;
    wait(&shared.ring_full[ring.slot], ring.parity);
    const bool skip = !any_visible(shared.visible[j % kIdSlots]);
    if (skip) {
      skip_tile(shared, ring, parity, thread);
      continue;
    }
    // S = Q K^T, dP = dO V^T
    warpgroup_fence_operand(r_s);
    warpgroup_fence_operand(r_dp);
    int previous = 0;
    cute::for_each(make_int_sequence<kParts>{}, [&](auto part) {
      if (part > 0) wait(&shared.ring_full[ring.slot], ring.parity);
      fence_async_proxy();
      warpgroup_arrive();
      Bf16* keys = shared.keys[ring.slot];
      cute::for_each(make_int_sequence<kPartChunks>{}, [&](auto c) {
        constexpr int kChunk = part * kPartChunks + c;
        if constexpr (kChunk < kChunks) {
          Tensor s_k = make_tensor(make_smem_ptr(keys + c * kChunkElements), RowsByColumns<kChunkColumns>{});
          Tensor r_k = register_mma.get_slice(thread).partition_fragment_B(s_k);
          const auto scale = kChunk == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
          const auto multiply_chunk = [&](auto& r_a, Bf16* s_first, auto& r_product) {
            register_mma.accumulate_ = shared_mma.accumulate_ = scale;
            if constexpr (kChunk / kHalfChunks == 1 - kRank) {
#pragma unroll
              for (int k = 0; k < kSteps; ++k) {
                gemm(register_mma, r_a(_, 0, kChunk % kHalfChunks * kSteps + k), r_k(_, 0, k), r_product(_, 0, 0));
                register_mma.accumulate_ = GMMA::ScaleOut::One;
              }
            } else {
              constexpr int kPlace = kChunk < kValueChunks ? kChunk % kHalfChunks : kHalfChunks;
              Tensor s_a = make_tensor(make_smem_ptr(s_first + kPlace * kPairChunk + kRank * kBlockChunk),
                                       RowsByColumns<kChunkColumns>{});
              Tensor r_shared = shared_mma.get_slice(thread).partition_fragment_A(s_a);
#pragma unroll
              for (int k = 0; k < kSteps; ++k) {
                gemm(shared_mma, r_shared(_, 0, k), r_k(_, 0, k), r_product(_, 0, 0));
                shared_mma.accumulate_ = GMMA::ScaleOut::One;
              }
            }
          };
          multiply_chunk(r_q, shared.q, r_s);
          if constexpr (kChunk < kValueChunks) multiply_chunk(r_do, shared.dout, r_dp);
        }
      });
      warpgroup_commit_batch();
      if constexpr (part > 0) {
        warpgroup_wait<1>();
        if (lane == 0) arrive(&shared.ring_free[previous]);
      }
      previous = ring.slot;
      ring.advance();
    });
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_s);
    warpgroup_fence_operand(r_dp);
    if (lane == 0) arrive(&shared.ring_free[previous]);
    if (thread == 0) tma_store_wait_read(), arrive(&shared.probs_free);
#pragma unroll
    for (int i = 0; i < size(r_s); ++i) {
      const RowFactors& factors = rows[i / 2 % 2];
      r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, factors.base));
      r_dp(i) = r_s(i) * fmaf(r_dp(i), factors.slope, factors.offset);
      r_s(i) *= factors.share;
    }
    if (heads < kBlockHeads) {
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        if (row + i / 2 % 2 * 8 >= heads) r_s(i) = r_dp(i) = 0.f;
      }
    }
    const VisibleColumns visible(shared.visible[j % kIdSlots], lane);
    if (!visible.all()) {
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        if (!visible[i]) r_s(i) = r_dp(i) = 0.f;
      }
    }
    wait(&shared.probs_free, parity);
    store_accumulators<kBlockK>(shared_address(shared.probs[kRank]), r_s, thread);
    store_accumulators<kBlockK>(shared_address(shared.dscores[kRank]), r_dp, thread);
    const int from_first = j + place.first_tile;
    const int tile = from_first < place.tiles ? from_first : from_first - place.tiles;
    publish_scores(shared, g_dscores + int64_t{tile} * (2 * kProbsBytes), kRank, thread);
  }
  if (thread == 0) tma_store_wait_read();
}

// Issues and commits kColumns columns of P^T dO + dS^T Q, or, in the tail, of dS^T Q. `first`: elements of Q and dO
// before their chunk; `column`: their first column in the chunk.
template <int kColumns, bool kTail, int kQk, class Accumulator>
__device__ __forceinline__ void multiply_pair(PairStorage<kQk>& shared, int first, int column, Accumulator& r_dkv,
                                              int thread) {
  using namespace cute;
  constexpr int kSpan = kColumns < kChunkColumns ? kChunkColumns : kColumns;  // whole chunks
  TransposedMma<kColumns> mma;
  const auto heads_of = [&](Bf16* s) {
    Tensor s_rows = make_tensor(make_smem_ptr(&recomputed(*s)), ColumnsByHeads<kBlockK, kPairHeads>{});
    return mma.get_slice(thread).partition_fragment_A(s_rows);
  };
  const auto columns_of = [&](Bf16* s) {
    Tensor s_columns = make_tensor(make_smem_ptr(&recomputed(s[first])), ColumnsByHeads<kSpan, kPairHeads>{});
    Tensor r_columns = TransposedMma<kSpan>{}.get_slice(thread).partition_fragment_B(s_columns);
    return make_tensor(r_columns.data() + column * int(sizeof(Bf16)) / 16, r_columns.layout());
  };
  warpgroup_fence_operand(r_dkv);
  warpgroup_arrive();
  multiply(mma, heads_of(shared.dscores[0]), columns_of(shared.q), r_dkv);
  if constexpr (!kTail) multiply_add(mma, heads_of(shared.probs[0]), columns_of(shared.dout), r_dkv);
  warpgroup_commit_batch();
}

// One of the two gradient warpgroups: two chunks of dkv, and 16 columns of the tail. The first one also writes the sums
// of P over the heads of the own block, if kDist.
template <int kQk, bool kDeterministic, bool kDist>
__device__ __forceinline__ void add_pair(PairStorage<kQk>& shared, const Params& p, const Item& item, int rank,
                                         int half, int thread) {
  using namespace cute;
  constexpr bool kTail = kQk > 512;
  constexpr int kColumns = kHalfChunks / 2 * kChunkColumns;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const ItemPlace place = item.place(p);
  Tensor r_dkv = partition_fragment_C(TransposedMma<kColumns>{}, Shape<_64, Int<kColumns>>{});
  Tensor r_tail = partition_fragment_C(TransposedMma<16>{}, Shape<_64, _16>{});
  const uint32_t peer_free = remote_address(&shared.probs_free, rank ^ 1);
  const int columns = rank * kHalfChunks * kChunkColumns + half * kColumns;
  const auto release = [&] {
    if (lane == 0) arrive(&shared.probs_free), arrive_remote(peer_free);
  };
  release();
  write_dots(shared, p, item, half * kWarpsPerWarpgroup + warp, lane);
  wait(&shared.inputs_full, 0);
#pragma unroll 1
  for (int j = 0; j < item.tiles; ++j) {
    wait(&shared.probs_full, j % 2);
    if (!any_visible(shared.visible[j % kIdSlots])) {
      __syncwarp();  // all lanes have read the ids of the tile before
      release();
      continue;
    }
    const int* warp_ids = shared.ids[j % kIdSlots] + warp * 16;
    if constexpr (kTail)
      multiply_pair<16, true>(shared, kHalfChunks * kPairChunk, rank * 32 + half * 16, r_tail, thread);
    [[maybe_unused]] KeySums sums;
    if constexpr (kDist) {
      if (half == 0) sums.multiply(shared.probs[rank], shared.ones, thread);
    }
    multiply_pair<kColumns, false>(shared, half * (kHalfChunks / 2) * kPairChunk, 0, r_dkv, thread);
    warpgroup_wait<0>();
    release();
    warpgroup_fence_operand(r_dkv);
    if constexpr (kTail) warpgroup_fence_operand(r_tail);
    if constexpr (kDeterministic) {
      Bf16* g_rows = place.g_rows + int64_t{j * kBlockK + warp * 16} * kQk;
      if constexpr (kTail) store_half_rows(g_rows + 512 + rank * 32, half, kQk, warp_ids, r_tail, lane);
      store_rows(g_rows + columns, kQk, warp_ids, r_dkv, lane);
    } else {
      if constexpr (kTail) {
        // Sixteen columns: a quad has 64 bytes of its rows.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int id = warp_ids[lane / 4 + 8 * r];
          float* g_row = place.g_sums + int64_t{id} * (p.groups * kQk) + 512 + rank * 32 + half * 16 + lane % 4 * 4;
          add_to_global(g_row, id, r_tail(2 * r), r_tail(2 * r + 1), r_tail(2 * r + 4), r_tail(2 * r + 5));
        }
      }
      const uint32_t row_bytes = p.groups * kQk * sizeof(float);
      const auto row_of = [&](int n) { return sum_row(place.g_sums + columns, row_bytes, warp_ids, n, lane); };
      add_rows<1>(row_of, r_dkv, lane);
    }
    if constexpr (kDist) {
      if (half == 0) sums.write(place, item.dist(p), j, warp, lane);
    }
  }
  if (half == 0 && thread == 0 && p.finished != nullptr) atomicAdd(p.finished, 1);
}

template <int kQk>
__device__ __forceinline__ void gather_pair(PairStorage<kQk>& shared, const Params& p, const Item& item, int rank,
                                            int thread) {
  constexpr int kChunks = kQk / kChunkColumns, kParts = PairStorage<kQk>::kParts;
  const ItemPlace place = item.place(p);
  const char* g_keys = place.g_keys + gather_piece(thread) * 16;
  const uint32_t piece = swizzled_offset(gather_row(thread), gather_piece(thread));
  int ids[kGatherRowsPerThread];
  const auto load_ids = [&](int j) {
    int tile = j + place.first_tile;
    if (tile >= place.tiles) tile -= place.tiles;
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      const int slot = tile * kBlockK + gather_row(thread) + i * kGatherRowStep;
      ids[i] = j < place.tiles && slot < place.slots ? __ldg(place.g_ids + slot) : -1;
    }
  };
  load_ids(0);
  Ring<kRingSlots> ring;
#pragma unroll 1
  for (int j = 0; j < place.tiles; ++j) {
    if (j == place.tiles / 2) prefetch_inputs(p, blockIdx.x / 2 + p.num_sms / 2, rank, thread);
    const GatherRows rows(g_keys, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, place.ids);
    if (gather_piece(thread) == 0) {
#pragma unroll
      for (int i = 0; i < kGatherRowsPerThread; ++i) {
        shared.ids[j % kIdSlots][gather_row(thread) + i * kGatherRowStep] = rows.visible >> i & 1 ? ids[i] : -1;
      }
    }
    publish_visible(shared.visible[j % kIdSlots], rows, thread);
    load_ids(j + 1);
    cute::for_each(cute::make_int_sequence<kParts>{}, [&](auto part) {
      wait(&shared.ring_free[ring.slot], ring.parity ^ 1);
      const uint32_t to = shared_address(shared.keys[ring.slot]) + piece;
#pragma unroll
      for (int i = 0; i < kGatherRowsPerThread; ++i) {
#pragma unroll
        for (int c = 0; c < kPartChunks; ++c) {
          const int chunk = part * kPartChunks + c;
          if (chunk >= kChunks) continue;
          copy_16_bytes(to + i * kGatherRowStep * kSwizzleRowBytes + c * kChunkBytes,
                        rows.g_rows[i] + chunk * kSwizzleRowBytes, rows.visible >> i & 1 ? 16 : 0);
        }
      }
      arrive(&shared.ring_full[ring.slot]);
      arrive_after_copies(&shared.ring_full[ring.slot]);
      ring.advance();
    });
  }
}

template <int kQk, bool kDeterministic, bool kDist>
__global__ void __launch_bounds__(kPairThreads, 1)
    sparse_mla_bwd_pair_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                               const __grid_constant__ CUtensorMap dout_map) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<PairStorage<kQk>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx(), rank = cluster_rank();
  const Item item = Item::of_pair(p, blockIdx.x / 2, rank);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&dout_map);
    barrier_init(&shared.inputs_full, 1);
    for (uint64_t& barrier : shared.ring_full) barrier_init(&barrier, 2 * kWarpgroupThreads);
    for (uint64_t& barrier : shared.ring_free) barrier_init(&barrier, kWarpsPerWarpgroup);
    barrier_init(&shared.probs_full, 1);
    // The gradient warps of both CTAs, and the score thread whose store of dS has been read.
    barrier_init(&shared.probs_free, 2 * 2 * kWarpsPerWarpgroup + 1);
    barrier_init(&shared.dots_full, 2 * kWarpsPerWarpgroup);
    fence_barrier_init();
  }
  if constexpr (kDist) {
    if (threadIdx.x < kOnes) shared.ones[threadIdx.x] = Bf16(1.f);
    fence_async_proxy();
  }
  cute::cluster_sync();
  if (warpgroup == 0) {
    set_registers<kScoreRegisters, kRegistersAtLaunch>();
    if (rank == 0) {
      score_pair<kQk, 0>(shared, p, item, {q_map, dout_map, dout_map}, thread);
    } else {
      score_pair<kQk, 1>(shared, p, item, {q_map, dout_map, dout_map}, thread);
    }
  } else if (warpgroup == 3) {
    set_registers<kGatherRegisters, kRegistersAtLaunch>();
    gather_pair(shared, p, item, rank, thread);
  } else {
    set_registers<kAddRegisters, kRegistersAtLaunch>();
    add_pair<kQk, kDeterministic, kDist>(shared, p, item, rank, warpgroup - 1, thread);
  }
  cute::cluster_sync();  // the peer may still send, and arrive at barriers
}

}  // namespace dsa::sparse_mla_bwd
