// The indexer's gradients; a row is a head of a query. With S = Q K^T; g of query and key (0: not listed); w of a row:
//
//   D = g [S > 0]   (rows x keys),   dq_r = w_r sum_i D_ri k_i,   dw_r = q_r . sum_i D_ri k_i,   dk_i += D_ri w_r q_r
//
// Queries form groups of 128 rows, whose lists are merged first (merge.cuh), so that a key that several of them list is
// read once and added to its row of dk once: the additions are the bottleneck. A persistent CTA walks over groups.
//
// Warp specialization. Who does what, for each tile of 64 keys (registers for 128 / 64 columns):
//
//   role       warpgroup  registers  does                                         waits on            signals
//   rows 0, 1  0, 1       168 / 152  64 rows each: S, D; w D to shared memory     full, q_full,       derivatives_full
//                                    sum_i D_ri k_i, in registers                 derivatives_empty   empty
//                                    end of the group: dq and dw                                      q_empty
//   keys       2          112 / 128  dk = (w D)^T Q, 64 columns at a time; adds   full, q_full,       empty, q_empty,
//                                    the 64 columns before meanwhile              derivatives_full    derivatives_empty
//   gather     3          64 / 80    keys, ids and g of a tile                    empty               full
//                                    Q (by TMA) and weights of a group            q_empty, q_landed   q_full
#pragma once

#include <cutlass/cutlass.h>

#include "params.h"
#include "rows.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/scatter.cuh"

namespace dsa::indexer_bwd {

// Producer: loads tiles and Q. Run by one warpgroup.
template <int kColumns, int kHeads>
__device__ __forceinline__ void gather(SharedStorage<kColumns, kHeads>& shared, const Params& p,
                                       const CUtensorMap& q_map, int thread) {
  constexpr int kChunks = kColumns / kChunkColumns, kPieceEntries = 4, kPieceGradients = 8;  // per 16 bytes
  constexpr int kQueries = queries_of_group(kHeads);
  const uint32_t piece_offset = swizzled_offset(gather_row(thread), gather_piece(thread));
  const char* g_keys = static_cast<const char*>(p.k) + gather_piece(thread) * 16;
  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  int count = 0;

  const auto publish = [&](int first_entry, int group) {
    auto& step = shared.steps[ring.slot];
    arrive_after_copies(&shared.full[ring.slot]);
    if (thread == 0) {
      step.first_entry = first_entry, step.group = group, step.count = count;
      arrive(&shared.full[ring.slot]);
    }
    ring.advance();
  };
  const auto request_queries = [&](int group) {
    const int at = count % kGroups;
    wait(&shared.q_empty[at], count / kGroups % 2 ^ 1);
    if (thread != 0) return;
    arrive_and_expect(&shared.q_landed[at], sizeof(shared.q[at]));
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tma_load(shared.q[at] + chunk * kRows * kChunkColumns, &q_map,
               {chunk * kChunkColumns, 0, 0, p.first_query + group * kQueries, 0}, &shared.q_landed[at]);
    }
  };
  // Queries without entries may hold anything, so they are replaced by zeros.
  const auto publish_queries = [&](int group) {
    const int at = count % kGroups, query = p.first_query + group * kQueries + thread / kHeads;
    const bool listed = __ldg(p.listing + group) >> thread / kHeads & 1;
    shared.weights[at][thread] =
        listed ? __ldg(p.weights + query * p.weights_stride_s + thread % kHeads * p.weights_stride_h) : 0.f;
    wait(&shared.q_landed[at], count / kGroups % 2);
    if (!listed) {
      for (int piece = 0; piece < kColumns / 8; ++piece) {
        char* chunk = reinterpret_cast<char*>(shared.q[at] + piece / 8 * kRows * kChunkColumns);
        *reinterpret_cast<uint4*>(chunk + swizzled_offset(thread, piece % 8)) = {};
      }
    }
    fence_async_proxy();
    arrive(&shared.q_full[at]);
  };

  for (int group = blockIdx.x; group < (p.queries + kQueries - 1) / kQueries; group += gridDim.x) {
    const int tiles = (p.counts[group] + kTileKeys - 1) / kTileKeys;
    const int turn = p.spread && tiles > 0 ? group % tiles : 0;
    const int* g_entries = p.entries + static_cast<int64_t>(group) * p.capacity;
    const uint16_t* g_gradients =
        static_cast<const uint16_t*>(p.gradients) + static_cast<int64_t>(group) * p.capacity * kQueries;
    const auto first_entry = [&](int index) {  // of the `index`-th tile to take
      const int tile = index + turn;
      return (tile < tiles ? tile : tile - tiles) * kTileKeys;
    };
    int ids[kGatherRowsPerThread];
    const auto load_ids = [&](int index) {
#pragma unroll
      for (int i = 0; i < kGatherRowsPerThread; ++i) {
        ids[i] = __ldg(g_entries + first_entry(index) + gather_row(thread) + i * kGatherRowStep);
      }
    };
    if (tiles > 0) load_ids(0);
    request_queries(group);
    for (int index = 0; index < tiles; ++index) {
      const GatherRows rows(g_keys, static_cast<uint32_t>(p.k_stride * sizeof(Bf16)), ids, {0, p.seq_kv});
      if (index + 1 < tiles) load_ids(index + 1);
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      rows.template copy<0, 0, kChunks>(shared_address(shared.keys[ring.slot]) + piece_offset);
      const auto& step = shared.steps[ring.slot];
      const int entry = first_entry(index);
      if (thread < kTileKeys / kPieceEntries) {
        copy_16_bytes(shared_address(step.ids + thread * kPieceEntries), g_entries + entry + thread * kPieceEntries,
                      16);
      }
      if (thread < kTileKeys * kQueries / kPieceGradients) {
        copy_16_bytes(shared_address(step.gradients + thread * kPieceGradients),
                      g_gradients + static_cast<int64_t>(entry) * kQueries + thread * kPieceGradients, 16);
      }
      publish(entry, group);
      if (index == 0) publish_queries(group);
    }
    if (tiles == 0) publish_queries(group);  // all gradients are 0, whatever Q holds
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    publish(kGroupEnds, group);
    ++count;
  }
  wait(&shared.empty[ring.slot], ring.parity ^ 1);
  publish(kAllEnd, 0);
}

// Computes dk. Run by one warpgroup.
template <int kColumns, int kHeads, bool kDeterministic>
__device__ __forceinline__ void add_to_keys(SharedStorage<kColumns, kHeads>& shared, const Params& p, int thread) {
  using namespace cute;
  constexpr int kLast = kColumns / kChunkColumns - 1;
  static_assert(kLast <= 1);
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  TransposedMma<kChunkColumns> mma;
  // 64 columns of a tile. Of two chunks per tile, the first is `even`; with one per tile, tiles alternate.
  struct Chunk {
    decltype(partition_fragment_C(mma, Shape<_64, Int<kChunkColumns>>{})) r_sum;
    RowIds ids;
    int64_t first_row;  // of the warp's rows of dk, in a deterministic call
  } even, odd;

  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  Ring<kDerivatives> derivatives;
  int at = 0;  // stage of Q
  // Waits for the next tile; false if there is none.
  const auto next_tile = [&](Chunk& chunk) {
    for (;; ring.advance()) {
      wait(&shared.full[ring.slot], ring.parity);
      const auto& step = shared.steps[ring.slot];
      const int first_entry = read_for_warp(step.first_entry), count = read_for_warp(step.count);
      if (first_entry == kAllEnd) return false;
      at = count % kGroups;
      if (first_entry == kGroupEnds) {
        arrive(&shared.q_empty[at]);
        arrive(&shared.empty[ring.slot]);
        continue;
      }
      chunk.ids = RowIds(step.ids + warp * 16, lane);
      chunk.first_row = static_cast<int64_t>(read_for_warp(step.group)) * p.capacity + first_entry + warp * 16;
      fence_async_proxy();  // the ids have been read: ptxas moves their shuffle behind the arrival
      arrive(&shared.empty[ring.slot]);
      ring.advance();
      wait(&shared.q_full[at], count / kGroups % 2);
      wait(&shared.derivatives_full[derivatives.slot], derivatives.parity);
      return true;
    }
  };
  const auto add = [&](Chunk& chunk, int column) {
    if constexpr (kDeterministic) {
      Bf16* g_rows = static_cast<Bf16*>(p.dk.rows) + chunk.first_row * kColumns + column;
      store_rows(g_rows, kColumns, chunk.ids, chunk.r_sum, lane);
    } else {
      constexpr uint32_t kRowBytes = kColumns * sizeof(float);
      const auto row_of = [&](int i) { return sum_row(p.dk.sums + column, kRowBytes, chunk.ids, i, lane); };
      add_rows<kChunkColumns / kScatterColumns>(row_of, chunk.r_sum, lane);
    }
  };
  const auto add_even = [&] { add(even, 0); };
  const auto add_odd = [&] { add(odd, kLast * kChunkColumns); };
  const auto compute = [&](Chunk& chunk, auto number, const auto& add_before) {
    const auto r_d = mma.get_slice(thread).partition_fragment_A(
        make_tensor(make_smem_ptr(shared.derivatives[derivatives.slot]), ColumnsByHeads<kTileKeys, kRows>{}));
    const auto r_q = mma.get_slice(thread).partition_fragment_B(make_tensor(
        make_smem_ptr(shared.q[at] + number * kRows * kChunkColumns), ColumnsByHeads<kChunkColumns, kRows>{}));
    warpgroup_fence_operand(chunk.r_sum);
    warpgroup_arrive();
    multiply(mma, r_d, r_q, chunk.r_sum);
    warpgroup_commit_batch();
    add_before();
    warpgroup_wait<0>();
    warpgroup_fence_operand(chunk.r_sum);
    if constexpr (number == kLast) {
      arrive(&shared.derivatives_empty[derivatives.slot]);
      derivatives.advance();
    }
  };
  // ptxas keeps wgmma in flight only if no unwritten accumulators are added: so the first product is peeled off.
  if (!next_tile(even)) return;
  compute(even, Int<0>{}, [] {});
  for (;;) {
    if constexpr (kLast == 1) {
      odd.ids = even.ids, odd.first_row = even.first_row;
    } else if (!next_tile(odd)) {
      return add_even();
    }
    compute(odd, Int<kLast>{}, add_even);
    if (!next_tile(even)) return add_odd();
    compute(even, Int<0>{}, add_odd);
  }
}

template <int kColumns, int kHeads, bool kDeterministic>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_bwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                       const __grid_constant__ CUtensorMap dq_map) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kColumns, kHeads>& shared = *reinterpret_cast<SharedStorage<kColumns, kHeads>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&dq_map);
    constexpr int kReaders = (kRowWarpgroups + 1) * kWarpgroupThreads;
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(&shared.q_landed[i], 1);
      barrier_init(&shared.q_full[i], kWarpgroupThreads);
      barrier_init(&shared.q_empty[i], kReaders);
    }
    for (int i = 0; i < SharedStorage<kColumns, kHeads>::kTiles; ++i) {
      barrier_init(&shared.full[i], kWarpgroupThreads + 1);
      barrier_init(&shared.empty[i], kReaders);
    }
    for (int i = 0; i < kDerivatives; ++i) {
      barrier_init(&shared.derivatives_full[i], kRowWarpgroups * kWarpgroupThreads);
      barrier_init(&shared.derivatives_empty[i], kWarpgroupThreads);
    }
    fence_barrier_init();
  }
  __syncthreads();
  constexpr Registers kRegisters = registers_of(kColumns);
  static_assert(kRowWarpgroups * kRegisters.rows + kRegisters.keys + kRegisters.gather <=
                kThreads / kWarpgroupThreads * kStartRegisters);
  if (warpgroup < kRowWarpgroups) {
    set_registers<kRegisters.rows, kStartRegisters>();
    compute_rows<kColumns, kHeads>(shared, p, dq_map, warpgroup, thread);
  } else if (warpgroup == kRowWarpgroups) {
    set_registers<kRegisters.keys, kStartRegisters>();
    add_to_keys<kColumns, kHeads, kDeterministic>(shared, p, thread);
  } else {
    set_registers<kRegisters.gather, kStartRegisters>();
    gather<kColumns, kHeads>(shared, p, q_map, thread);
  }
}

}  // namespace dsa::indexer_bwd
