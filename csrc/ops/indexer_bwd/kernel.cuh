// The indexer's gradients. With S = K Q^T of the rows of Q, each a head of a query, g of a key and a query, 0 where the
// query does not list the key, and w of a row:
//
//   D = g [S > 0]   (keys x rows),   dq_r = w_r sum_i D_ir k_i,   dw_r = q_r . sum_i D_ir k_i,   dk_i += D_ir w_r q_r
//
// Queries are taken in groups that have 128 rows together. Their lists are merged first (merge.cuh), so that a key that
// several of them list is read, and its row of dk added, once: additions are what takes the time. A CTA walks over
// groups. Its warpgroups, for each tile of 64 keys:
//
//   gather        keys, ids and g into a ring of tiles; Q of a group, and w Q beside it
//   score 0, 1    every other tile: S, D; D to shared memory; dK = D (w Q), and adds its rows to those of the keys
//   query         sum_i D_ir k_i of all tiles; dq and dw when a group ends
#pragma once

#include <cutlass/cutlass.h>

#include "config.h"
#include "params.h"
#include "sm90/gather.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/mma.cuh"
#include "sm90/scatter.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::indexer_bwd {

using namespace dsa::sm90;

static_assert(kTileKeys == kTileRows && kGatherRows == kTileRows && kChunkColumns == sm90::kChunkColumns);

inline constexpr int kQueryBarrier = 1;  // 0 is __syncthreads'

// What is known of a tile; or of a step without keys: behind a group's tiles each score warpgroup takes one such, to
// learn that the group has ended, and behind all groups another.
inline constexpr int kGroupEnds = -1, kAllEnd = -2;

template <int kQueries>
struct Step {
  alignas(16) int ids[kTileKeys];                        // -1 behind the last
  alignas(16) uint16_t gradients[kTileKeys * kQueries];  // bf16 [keys, queries]
  int first_entry;                                       // of the group's; or one of the above
  int group;
  int count;  // of groups that this CTA had before
};

template <int kColumns, int kHeads>
struct SharedStorage {
  static constexpr int kTiles = tiles_in_flight(kColumns);
  alignas(1024) Bf16 q[kGroups][kRows * kColumns];  // chunks of 64 columns; in the end dq
  alignas(1024) Bf16 weighted_q[kRows * kColumns];
  alignas(1024) Bf16 keys[kTiles][kTileKeys * kColumns];
  alignas(1024) Bf16 derivatives[kDerivatives][kTileKeys * kRows];  // D, [keys, rows] in chunks of 64 rows
  alignas(16) float weights[kGroups][kRows];
  float dweights[kGroups][kWarpsPerWarpgroup][kRows];
  Step<queries_of_group(kHeads)> steps[kTiles];
  uint64_t q_landed[kGroups], q_full[kGroups], q_empty[kGroups];
  uint64_t weighted_q_full, weighted_q_empty;
  uint64_t full[kTiles], empty[kTiles];
  uint64_t derivatives_full[kDerivatives], derivatives_empty[kDerivatives];
};

// For barriers that count warps.
__device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarpThreads == 0) arrive(barrier);
}

// Copies tiles and Q. By one warpgroup.
template <int kColumns, int kHeads>
__device__ __forceinline__ void gather(SharedStorage<kColumns, kHeads>& shared, const Params& p,
                                       const CUtensorMap& q_map, int thread) {
  constexpr int kChunks = kColumns / kChunkColumns, kPieceEntries = 4, kPieceGradients = 8;  // in 16 bytes
  constexpr int kQueries = queries_of_group(kHeads);
  const uint32_t piece_offset = swizzled_offset(gather_row(thread), gather_piece(thread));
  const char* g_keys = static_cast<const char*>(p.k) + gather_piece(thread) * 16;
  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  int count = 0;

  const auto publish = [&](int first_entry, int group) {
    auto& step = shared.steps[ring.slot];
    if (thread == 0) step.first_entry = first_entry, step.group = group, step.count = count;
    arrive_after_copies(&shared.full[ring.slot]);
    arrive_warp(&shared.full[ring.slot]);
    ring.advance();
  };
  const auto load_queries = [&](int group) {
    const int at = count % kGroups, first_query = p.first_query + group * kQueries;
    const uint32_t parity = count / kGroups % 2;
    wait(&shared.q_empty[at], parity ^ 1);
    if (thread == 0) {
      arrive_and_expect(&shared.q_landed[at], sizeof(shared.q[at]));
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        tma_load(shared.q[at] + chunk * kRows * kChunkColumns, &q_map, {chunk * kChunkColumns, 0, 0, first_query, 0},
                 &shared.q_landed[at]);
      }
    }
    const int query = first_query + thread / kHeads, head = thread % kHeads;
    // What queries without entries hold must not matter.
    const bool listed = __ldg(p.listing + group) >> thread / kHeads & 1;
    const float weight = listed ? __ldg(p.weights + query * p.weights_stride_s + head * p.weights_stride_h) : 0.f;
    shared.weights[at][thread] = weight;
    const auto row_piece = [&](Bf16* first, int piece) -> uint4& {
      char* chunk = reinterpret_cast<char*>(first + piece / 8 * kRows * kChunkColumns);
      return *reinterpret_cast<uint4*>(chunk + swizzled_offset(thread, piece % 8));
    };
    wait(&shared.q_landed[at], parity);
    if (!listed) {
      for (int piece = 0; piece < kColumns / 8; ++piece) row_piece(shared.q[at], piece) = {};
    }
    fence_async_proxy();
    arrive_warp(&shared.q_full[at]);
    wait(&shared.weighted_q_empty, count % 2 ^ 1);
    for (int piece = 0; piece < kColumns / 8; ++piece) {
      const uint4 values = row_piece(shared.q[at], piece);
      const auto weighted = [&](uint32_t pair) {
        return pack_bf16(__uint_as_float(pair << 16) * weight, __uint_as_float(pair & 0xffff0000u) * weight);
      };
      row_piece(shared.weighted_q, piece) = {weighted(values.x), weighted(values.y), weighted(values.z),
                                             weighted(values.w)};
    }
    fence_async_proxy();
    arrive_warp(&shared.weighted_q_full);
  };

  for (int group = blockIdx.x; group < (p.queries + kQueries - 1) / kQueries; group += gridDim.x) {
    const int tiles = (p.counts[group] + kTileKeys - 1) / kTileKeys;
    const int turn = p.spread && tiles > 0 ? group % tiles : 0;
    const int* g_entries = p.entries + static_cast<int64_t>(group) * p.capacity;
    const uint16_t* g_gradients =
        static_cast<const uint16_t*>(p.gradients) + static_cast<int64_t>(group) * p.capacity * kQueries;
    const auto first_entry = [&](int index) {  // of the tile that comes `index`-th
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
    for (int index = 0; index < tiles; ++index) {
      const GatherRows rows(g_keys, static_cast<uint32_t>(p.k_stride * sizeof(Bf16)), ids, p.seq_kv);
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
      if (index == 0) load_queries(group);
    }
    if (tiles == 0) load_queries(group);  // its gradients are 0, whatever it holds
    for (int i = 0; i < kScoreWarpgroups; ++i) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      publish(kGroupEnds, group);
    }
    ++count;
  }
  for (int i = 0; i < kScoreWarpgroups; ++i) {
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    publish(kAllEnd, 0);
  }
}

// D and dk. By a warpgroup, number `warpgroup`.
template <int kColumns, int kHeads, bool kDeterministic>
__device__ __forceinline__ void score(SharedStorage<kColumns, kHeads>& shared, const Params& p, int warpgroup,
                                      int thread) {
  using namespace cute;
  constexpr int kQueries = queries_of_group(kHeads), kEights = kRows / 8;
  static_assert(kColumns <= kRows);
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;

  NarrowScoreMma<kRows> score_mma;
  KeyRowsMma<kColumns> dk_mma;
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, Int<kRows>>{});
  Tensor r_dk = partition_fragment_C(dk_mma, Shape<_64, Int<kColumns>>{});
  Tensor r_d = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kRows / 16>>{});
  uint32_t* pairs = reinterpret_cast<uint32_t*>(r_d.data());

  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  Ring<kDerivatives> derivatives;
  ring.advance(warpgroup), derivatives.advance(warpgroup);
  for (;; ring.advance(kScoreWarpgroups), derivatives.advance(kScoreWarpgroups)) {
    wait(&shared.full[ring.slot], ring.parity);
    const auto& step = shared.steps[ring.slot];
    const int first_entry = read_for_warp(step.first_entry), count = read_for_warp(step.count);
    const int group = read_for_warp(step.group), at = count % kGroups;
    if (first_entry < 0) {
      wait(&shared.derivatives_empty[derivatives.slot], derivatives.parity ^ 1);
      arrive_warp(&shared.derivatives_full[derivatives.slot]);
      if (first_entry == kAllEnd) break;
      arrive_warp(&shared.q_empty[at]);
      arrive_warp(&shared.weighted_q_empty);
      arrive_warp(&shared.empty[ring.slot]);
      continue;
    }
    wait(&shared.q_full[at], count / kGroups % 2);
    fence_async_proxy();
    const auto r_keys = score_mma.get_slice(thread).partition_fragment_A(
        make_tensor(make_smem_ptr(shared.keys[ring.slot]), RowsByColumns<kColumns>{}));
    const auto r_q = score_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.q[at]), HeadsByColumns<kRows, kColumns>{}));
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    score_mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int k = 0; k < size<2>(r_keys); ++k) {
      gemm(score_mma, r_keys(_, _, k), r_q(_, _, k), r_s);
      score_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    const RowIds ids(step.ids + warp * 16, lane);
    wait(&shared.derivatives_empty[derivatives.slot], derivatives.parity ^ 1);
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_s);
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = warp * 16 + lane / 4 + r * 8;
        const uint32_t gradient = step.gradients[key * kQueries + eight * 8 / kHeads];
        // A score that is NaN counts as positive, like in the reference.
        pairs[eight * 2 + r] =
            (r_s(eight * 4 + r * 2) <= 0.f ? 0u : gradient) | (r_s(eight * 4 + r * 2 + 1) <= 0.f ? 0u : gradient << 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      store_matrices(shared_address(shared.derivatives[derivatives.slot]) + i / 4 * kChunkBytes +
                         swizzled_offset(warp * 16 + thread % 16, i % 4 * 2 + thread / 16 % 2),
                     pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
    }
    fence_async_proxy();
    arrive_warp(&shared.derivatives_full[derivatives.slot]);
    arrive_warp(&shared.empty[ring.slot]);

    wait(&shared.weighted_q_full, count % 2);
    const auto r_rows = dk_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.weighted_q), ColumnsByHeads<kColumns, kRows>{}));
    warpgroup_fence_operand(r_d);
    warpgroup_fence_operand(r_dk);
    warpgroup_arrive();
    dk_mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int k = 0; k < size<2>(r_d); ++k) {
      gemm(dk_mma, r_d(_, _, k), r_rows(_, _, k), r_dk);
      dk_mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_dk);
    if constexpr (kDeterministic) {
      const int64_t row = static_cast<int64_t>(group) * p.capacity + first_entry + warp * 16;
      store_rows(static_cast<Bf16*>(p.dk.rows) + row * kColumns, kColumns, ids, r_dk, lane);
    } else {
      add_rows(p.dk.sums, kColumns, ids, r_dk, lane);
    }
  }
}

// dq and dw. By one warpgroup.
template <int kColumns, int kHeads>
__device__ __forceinline__ void sum_queries(SharedStorage<kColumns, kHeads>& shared, const Params& p,
                                            const CUtensorMap& dq_map, int thread) {
  using namespace cute;
  constexpr int kChunks = kColumns / kChunkColumns;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  TransposedMma<kRows> mma;
  Tensor r_sum = partition_fragment_C(mma, Shape<Int<kColumns>, Int<kRows>>{});  // columns x rows
  clear(r_sum);
  int steps_without_keys = 0;

  Ring<SharedStorage<kColumns, kHeads>::kTiles> ring;
  Ring<kDerivatives> derivatives;
  for (;; ring.advance(), derivatives.advance()) {
    wait(&shared.full[ring.slot], ring.parity);
    wait(&shared.derivatives_full[derivatives.slot], derivatives.parity);
    const auto& step = shared.steps[ring.slot];
    const int first_entry = read_for_warp(step.first_entry), count = read_for_warp(step.count);
    const int query = p.first_query + read_for_warp(step.group) * queries_of_group(kHeads), at = count % kGroups;
    if (first_entry == kAllEnd) break;
    if (first_entry >= 0) {
      mma.accumulate_ = GMMA::ScaleOut::One;
      fence_async_proxy();
      const auto r_keys = mma.get_slice(thread).partition_fragment_A(
          make_tensor(make_smem_ptr(shared.keys[ring.slot]), ColumnsByRows<kColumns>{}));
      const auto r_d = mma.get_slice(thread).partition_fragment_B(
          make_tensor(make_smem_ptr(shared.derivatives[derivatives.slot]), ColumnsByRows<kRows>{}));
      warpgroup_fence_operand(r_sum);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < size<2>(r_keys); ++k) gemm(mma, r_keys(_, _, k), r_d(_, _, k), r_sum);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_sum);
    }
    arrive_warp(&shared.derivatives_empty[derivatives.slot]);
    arrive_warp(&shared.empty[ring.slot]);
    if (first_entry != kGroupEnds || steps_without_keys++ % kScoreWarpgroups != 0) continue;
    wait(&shared.q_full[at], count / kGroups % 2);
    const int matrix = lane / 8;  // of four, 8 x 8: first rows of Q, then columns
    float (&sums)[kWarpsPerWarpgroup][kRows] = shared.dweights[at];
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float dweights[4] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint32_t address = shared_address(shared.q[at] + chunk * kRows * kChunkColumns) +
                                 swizzled_offset(16 * i + matrix / 2 * 8 + lane % 8, warp * 2 + matrix % 2);
        uint32_t q[4], dq[4];
        load_matrices_transposed(address, q);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          float& low = r_sum(8 * i + 2 * m, chunk, 0);
          float& high = r_sum(8 * i + 2 * m + 1, chunk, 0);
          const int h = m / 2 * 2;
          const float2 weight = *reinterpret_cast<const float2*>(&shared.weights[at][16 * i + h * 4 + lane % 4 * 2]);
          dweights[h] = fmaf(low, __uint_as_float(q[m] << 16), dweights[h]);
          dweights[h + 1] = fmaf(high, __uint_as_float(q[m] & 0xffff0000u), dweights[h + 1]);
          dq[m] = pack_bf16(low * weight.x, high * weight.y);
          low = high = 0.f;
        }
        store_matrices_transposed(address, dq[0], dq[1], dq[2], dq[3]);
      }
#pragma unroll
      for (int h = 0; h < 4; ++h) {
#pragma unroll
        for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) {
          dweights[h] += __shfl_xor_sync(~0u, dweights[h], lanes);
        }
        if (lane < 4) sums[warp][16 * i + h / 2 * 8 + lane * 2 + h % 2] = dweights[h];
      }
    }
    fence_async_proxy();
    sync_warpgroup<kQueryBarrier>();
    if (thread == 0) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        tma_store(&dq_map, shared.q[at] + chunk * kRows * kChunkColumns, {chunk * kChunkColumns, 0, 0, query, 0});
      }
      tma_store_commit();
    }
    if (query + thread / kHeads < p.seq) {
      float sum = 0.f;
      for (const auto& of_warp : sums) sum += of_warp[thread];
      p.dweights[static_cast<int64_t>(query) * kHeads + thread] = sum;
    }
    if (thread == 0) {
      tma_store_wait_read();
      arrive(&shared.q_empty[at]);
    }
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
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(&shared.q_landed[i], 1);
      barrier_init(&shared.q_full[i], kWarpsPerWarpgroup);
      barrier_init(&shared.q_empty[i], kScoreWarpgroups * kWarpsPerWarpgroup + 1);
    }
    barrier_init(&shared.weighted_q_full, kWarpsPerWarpgroup);
    barrier_init(&shared.weighted_q_empty, kScoreWarpgroups * kWarpsPerWarpgroup);
    for (int i = 0; i < SharedStorage<kColumns, kHeads>::kTiles; ++i) {
      barrier_init(&shared.full[i], kWarpgroupThreads + kWarpsPerWarpgroup);
      barrier_init(&shared.empty[i], 2 * kWarpsPerWarpgroup);
    }
    for (int i = 0; i < kDerivatives; ++i) {
      barrier_init(&shared.derivatives_full[i], kWarpsPerWarpgroup);
      barrier_init(&shared.derivatives_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  constexpr Registers kRegisters = registers_of(kColumns);
  static_assert(kScoreWarpgroups * kRegisters.score + kRegisters.query + kRegisters.gather <=
                kThreads / kWarpgroupThreads * kStartRegisters);
  if (warpgroup < kScoreWarpgroups) {
    set_registers<kRegisters.score, kStartRegisters>();
    score<kColumns, kHeads, kDeterministic>(shared, p, warpgroup, thread);
  } else if (warpgroup == kScoreWarpgroups) {
    set_registers<kRegisters.query, kStartRegisters>();
    sum_queries<kColumns, kHeads>(shared, p, dq_map, thread);
  } else {
    set_registers<kRegisters.gather, kStartRegisters>();
    gather<kColumns, kHeads>(shared, p, q_map, thread);
  }
}

}  // namespace dsa::indexer_bwd
