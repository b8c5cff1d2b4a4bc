// Sparse MLA in its multi-head form, forward: dense attention with a bit mask. Math: docs/sparse_mla/sparse_mha.md.
//
// Warp specialization. Who does what (group g is warpgroup g and has 64 queries):
//
//   role     threads                  registers  does                                   waits on        signals
//   compute  warpgroups 0, 1          232        S = Q K^T, online softmax              q_full[g],      k_empty,
//                                                                                       k_full          q_empty[g]
//                                                O += P V, stores O and lse             v_full          v_empty
//   keys     warp 0 of warpgroup 2    40         loads keys (TMA) and bits (cp.async)   k_empty         k_full
//   values   warp 1 of warpgroup 2    40         loads values (TMA)                     v_empty         v_full
//   queries  warp 2 of warpgroup 2    40         counts tiles, loads queries (TMA)      q_empty[g]      q_full[g]
//
// Items are query blocks of a head (schedule.cuh). Only tiles of the mask that have bits are computed. While a group
// converts the scores of a tile to probabilities, its product of the previous tile's probabilities and values runs on
// the tensor cores, and then the products of the other group: the groups take turns at issuing products.
#pragma once

#include "ops/sparse_mla/sparse_mha/load.cuh"
#include "ops/sparse_mla/sparse_mha/scale.cuh"
#include "params.h"
#include "schedule.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/registers.cuh"
#include "sm90/turns.cuh"
#include "sm90/warpgroup.cuh"
#include "softmax.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::sparse_mha_fwd {

inline constexpr int kGroups = 2, kGroupRows = kBlock / kGroups, kGroupWarps = kGroups * kWarpsPerWarpgroup;
inline constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
inline constexpr int kComputeRegisters = 232, kCopyRegisters = 40, kStartRegisters = 168;
inline constexpr int kStages = 2;
inline constexpr int kTurnBarrier = 1;                        // of group 0; the next one is that of group 1
inline constexpr int kGroupBarrier = kTurnBarrier + kGroups;  // of the threads of group 0; the next one is group 1's

struct Maps {
  CUtensorMap q, k, k_rope, v;
};

struct SharedStorage {
  alignas(1024) Bf16 queries[kGroups][kGroupRows * kColumns];
  Bf16 keys[kStages][kBlock * kColumns];
  Bf16 values[kStages][kBlock * kValueColumns];
  // Twice the stages: a warp has used the bits of a tile when it releases the keys of the tile after the next.
  uint4 bits[2 * kStages][kBlock];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t q_full[kGroups], q_empty[kGroups];
  int tiles[kGroups];  // of the item whose queries arrive
};

// Run by one warp.
__device__ __forceinline__ void copy_keys(SharedStorage& shared, const Params& p, const Schedule& schedule,
                                          const Maps& maps, int lane) {
  Ring<kStages> ring;
  const int row_words = p.mask.kv_blocks * 4;
  for_items(p, schedule, [&](const Item& item) {
    const uint32_t* g_bits = p.mask.keys + (item.row(p) + lane) * row_words;
    for_tiles(p, item, [&](int tile) {
      wait(&shared.k_empty[ring.slot], ring.parity ^ 1);
      uint64_t* full = &shared.k_full[ring.slot];
      if (lane == 0) {
        Bf16* keys = shared.keys[ring.slot];
        arrive_and_expect(full, sizeof(shared.keys[0]));
        load_chunks<kBlock>(keys, 0, 2, maps.k, item.head, tile * kBlock, item.batch, full);
        load_chunks<kBlock>(keys, 2, 3, maps.k_rope, 0, tile * kBlock, item.batch, full);
      }
      const uint32_t bits = shared_address(shared.bits[ring.parity * kStages + ring.slot] + lane);
#pragma unroll
      for (int row = 0; row < kBlock; row += kWarpThreads) {
        copy_16_bytes(bits + row * sizeof(uint4), g_bits + row * row_words + tile * 4, 16);
      }
      arrive_after_copies(full);
      __syncwarp();
      ring.advance();
    });
  });
}

// Run by one thread.
__device__ __forceinline__ void copy_values(SharedStorage& shared, const Params& p, const Schedule& schedule,
                                            const Maps& maps) {
  Ring<kStages> ring;
  for_items(p, schedule, [&](const Item& item) {
    for_tiles(p, item, [&](int tile) {
      wait(&shared.v_empty[ring.slot], ring.parity ^ 1);
      uint64_t* full = &shared.v_full[ring.slot];
      arrive_and_expect(full, sizeof(shared.values[0]));
      load_chunks<kBlock>(shared.values[ring.slot], 0, 2, maps.v, item.head, tile * kBlock, item.batch, full);
      ring.advance();
    });
  });
}

// Run by one warp.
__device__ __forceinline__ void copy_queries(SharedStorage& shared, const Params& p, const Schedule& schedule,
                                             const Maps& maps, int lane) {
  uint32_t parity = 1;
  for_items(p, schedule, [&](const Item& item) {
    const int tiles = count_tiles(p, item, lane);
    for (int g = 0; g < kGroups; ++g) {
      wait(&shared.q_empty[g], parity);
      if (lane == 0) {
        shared.tiles[g] = tiles;
        arrive_and_expect(&shared.q_full[g], sizeof(shared.queries[0]));
        load_chunks<kGroupRows>(shared.queries[g], 0, 3, maps.q, item.head, item.block * kBlock + g * kGroupRows,
                                item.batch, &shared.q_full[g]);
      }
      __syncwarp();
    }
    parity ^= 1;
  });
}

// Changes the signs of a group's queries.
__device__ __forceinline__ void negate(Bf16* queries, int barrier, int thread) {
  uint4* pieces = reinterpret_cast<uint4*>(queries);
  constexpr uint32_t kSigns = 0x80008000;
  for (int i = thread; i < kGroupRows * kColumns / kPieceColumns; i += kWarpgroupThreads) {
    const uint4 piece = pieces[i];
    pieces[i] = {piece.x ^ kSigns, piece.y ^ kSigns, piece.z ^ kSigns, piece.w ^ kSigns};
  }
  fence_async_proxy();
  sync_warpgroup(barrier);
}

// Stores normalized rows, and their lse.
template <class Out>
__device__ __forceinline__ void store(Softmax& softmax, Out& r_out, const Params& p, const Item& item, int group,
                                      int thread) {
  const int lane = thread % kWarpThreads;
  softmax.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float share = softmax.share(r);
#pragma unroll
    for (int i = 2 * r; i < r_out.size(); i += 4) r_out(i) *= share, r_out(i + 1) *= share;
    const int query = item.block * kBlock + group * kGroupRows + thread / kWarpThreads * 16 + lane / 4 + 8 * r;
    const bool exists = query < p.seq_q;
    Bf16* g_out = static_cast<Bf16*>(p.out.data) + item.batch * p.out.stride_b + query * p.out.stride_s +
                  item.head * p.out.stride_h;
    store_row<kValueColumns>(reinterpret_cast<Piece*>(g_out), exists, r_out, r, lane);
    if (exists && lane % 4 == 0) {
      p.lse[(static_cast<int64_t>(item.batch) * p.seq_q + query) * p.heads + item.head] = softmax.lse(r);
    }
  }
}

__device__ __forceinline__ void compute(SharedStorage& shared, const Params& p, const Schedule& schedule, int group,
                                        int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  NarrowScoreMma<kBlock> score_mma;
  RowsMma<kValueColumns> value_mma;
  const auto r_q = score_mma.get_slice(thread).partition_fragment_A(
      make_tensor(make_smem_ptr(shared.queries[group]), RowsByColumns<kColumns>{}));
  Tensor r_s = partition_fragment_C(score_mma, Shape<Int<kGroupRows>, Int<kBlock>>{});
  Tensor r_p = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kBlock / 16>>{});
  Tensor r_out = partition_fragment_C(value_mma, Shape<Int<kGroupRows>, Int<kValueColumns>>{});
  auto& pairs = *reinterpret_cast<uint32_t (*)[kBlock / 4]>(r_p.data());

  Ring<kStages> k_ring, v_ring;
  uint32_t parity = 0;
  const float scale_log2 = positive_scale_log2(p.sm_scale);
  const auto start_scores = [&] {
    const auto r_k = score_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.keys[k_ring.slot]), HeadsByColumns<kBlock, kColumns>{}));
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    multiply(score_mma, r_q, r_k, r_s);
    warpgroup_commit_batch();
  };
  const auto start_output = [&] {
    wait(&shared.v_full[v_ring.slot], v_ring.parity);
    const auto r_v = value_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.values[v_ring.slot]), ColumnsByHeads<kValueColumns, kBlock>{}));
    warpgroup_fence_operand(r_p);
    warpgroup_fence_operand(r_out);
    warpgroup_arrive();
    multiply_add(value_mma, r_p, r_v, r_out);
    warpgroup_commit_batch();
  };
  const auto finish_output = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_out);
    if (lane == 0) arrive(&shared.v_empty[v_ring.slot]);
    v_ring.advance();
  };
  const auto read_bits = [&] {
    return SelectedKeys(shared.bits[k_ring.parity * kStages + k_ring.slot] + group * kGroupRows + warp * 16, lane);
  };
  const auto release_keys = [&](bool is_last) {
    if (lane == 0) {
      arrive(&shared.k_empty[k_ring.slot]);
      if (is_last) arrive(&shared.q_empty[group]);
    }
    k_ring.advance();
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) pairs[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
  };

  value_mma.accumulate_ = GMMA::ScaleOut::One;
  if (group == 1) arrive_threads(kTurnBarrier, kGroups * kWarpgroupThreads);
  for_items(p, schedule, [&](const Item& item) {
    wait(&shared.q_full[group], parity);
    parity ^= 1;
    int left = read_for_warp(shared.tiles[group]);
    if (p.sm_scale < 0.f) negate(shared.queries[group], kGroupBarrier + group, thread);
    Softmax softmax(scale_log2);
    clear(r_out);
    if (left == 0) {
      if (lane == 0) arrive(&shared.q_empty[group]);
    } else {
      float factors[2];
      wait(&shared.k_full[k_ring.slot], k_ring.parity);
      start_scores();
      {
        const SelectedKeys keys = read_bits();
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_s);
        release_keys(left == 1);
        keys.apply(r_s);
      }
      softmax.raise(r_s, factors);
      softmax.exponentiate(r_s);
      pack();
#pragma unroll 1
      while (--left > 0) {
        wait(&shared.k_full[k_ring.slot], k_ring.parity);
        sync_threads(kTurnBarrier + group, kGroups * kWarpgroupThreads);
        start_scores();
        start_output();
        arrive_threads(kTurnBarrier + 1 - group, kGroups * kWarpgroupThreads);
        const SelectedKeys keys = read_bits();
        warpgroup_wait<1>();
        warpgroup_fence_operand(r_s);
        release_keys(left == 1);
        keys.apply(r_s);
        const bool moved = softmax.raise(r_s, factors);
        softmax.exponentiate(r_s);
        finish_output();
        if (moved) {
#pragma unroll
          for (int i = 0; i < r_out.size(); ++i) r_out(i) *= factors[i / 2 % 2];
        }
        pack();
      }
      start_output();
      finish_output();
    }
    store(softmax, r_out, p, item, group, thread);
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    sparse_mha_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule schedule,
                          const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.k_full[i], 1 + kWarpThreads);
      barrier_init(&shared.k_empty[i], kGroupWarps);
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.v_empty[i], kGroupWarps);
    }
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.k_rope);
    prefetch_tensor_map(&maps.v);
  }
  __syncthreads();
  if (warpgroup < kGroups) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute(shared, p, schedule, warpgroup, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0), lane = thread % kWarpThreads;
    if (warp == 0) copy_keys(shared, p, schedule, maps, lane);
    if (warp == 1 && lane == 0) copy_values(shared, p, schedule, maps);
    if (warp == 2) copy_queries(shared, p, schedule, maps, lane);
  }
}

}  // namespace dsa::sparse_mha_fwd
