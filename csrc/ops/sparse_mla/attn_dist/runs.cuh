// attn_dist of runs of neighboring queries whose lists are merged: a run's heads are the 64 rows of S = Q K^T.
//
// Warp specialization. Who does what:
//
//   role     warpgroups  registers  does                                           waits on           signals
//   score    0, 1        216        Q to registers; S of every other tile; sums    full, listed_full  empty
//                                   over the heads of each query, to its slots
//   gather   2           72         entries of some tiles ahead                    empty              full
//                                   Q of an item, once for each score warpgroup    entries_full       listed_full
//                                   keys of a tile, and which query lists them
//                                   zeros in the slots behind a query's keys
//
// A persistent CTA walks over runs. Q and keys pass through one ring buffer, in parts of some columns. The score
// warpgroups take its tiles, the two copies of Q among them, in turn. Keys and Q need not arrive in order, and a stage
// that the other warpgroup still waits for has the phase that this one waits for. So listed_full of a tile, for which a
// warpgroup waits first, is signaled when all stages of the tile have been released by those who had them before.
//
// Entries come by TMA, which signals entries_full: loads to registers would return after the keys that the thread has
// copied before them, so that fewer than two tiles would be under way.
//
// Q in registers leaves shared memory to the keys: with Q there too, the ring would be too short to hide the latency of
// the gather, and products would read twice as much.
#pragma once

#include <cutlass/cutlass.h>

#include "run_entries.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"
#include "tiles/softmax.cuh"

namespace dsa::attn_dist {

using namespace dsa::tiles;

// Per thread: 144 of Q, 32 of S and 40 others in the score warpgroups.
inline constexpr int kScoreRegisters = 216, kGatherRegisters = 72;

template <RunConfig kC>
__device__ __forceinline__ void gather_runs(RunStorage<kC>& shared, const RunParams& p, const CUtensorMap& q_map,
                                            int thread) {
  constexpr int kParts = kC.parts(), kChunks = kC.part_chunks();
  const uint32_t piece_offset = swizzled_offset(gather_row(thread), gather_piece(thread));
  const uint32_t row_bytes = static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16));
  Ring<kC.tiles()> ring;
  Ring<kC.listed_slots()> listed_ring;
  RunLists<kC.queries> run_lists;
  TileEntries<kC> entries{shared, thread};
  const auto signal_listed = [&] {
    if (thread % kWarpThreads == 0) arrive(&shared.listed_full[listed_ring.slot]);
    listed_ring.advance();
  };
  const Runs runs(p);
  RunItem item(p, runs.load(blockIdx.x));
  for (int index = blockIdx.x; index < runs.count; index += gridDim.x) {
    const RunItem next(p, runs.load(index + gridDim.x));
    const int next_tiles = index + gridDim.x < runs.count ? next.tiles : 0;
#pragma unroll 1
    for (int copy = 0; copy < kScoreWarpgroups; ++copy) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        uint64_t* const full = &shared.full[ring.slot][part];
        wait(&shared.empty[ring.slot][part], ring.parity ^ 1);
        if (part == kParts - 1) signal_listed();
        if (thread == 0) {
          expect_bytes(full, kChunks * kChunkBytes);
          for (int chunk = part * kChunks; chunk < (part + 1) * kChunks; ++chunk) {
            tma_load(shared.keys[ring.slot] + chunk * kChunkElements, &q_map,
                     {chunk * kChunkColumns, 0, 0, item.s, item.b}, full);
          }
        }
        arrive(full);
      }
      ring.advance();
    }
    const char* g_keys = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + item.b * p.kv_stride_b) +
                         gather_piece(thread) * 16;
    const auto find_rows = [&](int tile) {
      entries.load_ahead(item, next, next_tiles, tile);
      return entries.rows(g_keys, row_bytes, item.entries - tile * kTileRows);
    };
    GatherRows rows = find_rows(0);
    for (int tile = 0; tile < item.tiles; ++tile) {
      GatherRows next_rows = rows;
      cute::for_each(cute::make_int_sequence<kParts>{}, [&](auto part) {
        constexpr int kBegin = part * kChunks;
        constexpr bool kIsLast = part == kParts - 1;
        if constexpr (kIsLast) {  // while copies are under way
          entries.ring.advance();
          if (tile + 1 < item.tiles) next_rows = find_rows(tile + 1);
        }
        wait(&shared.empty[ring.slot][part], ring.parity ^ 1);
        if (kIsLast) signal_listed();
        rows.template copy<0, kBegin, kBegin + kChunks>(shared_address(shared.keys[ring.slot]) + piece_offset);
        arrive_after_copies(&shared.full[ring.slot][part]);
        if (part == 0) {
          run_lists.publish(shared.listed[listed_ring.slot], shared.entries[entries.ring.slot],
                            item.entries - tile * kTileRows, thread);
        }
      });
      ring.advance();
      rows = next_rows;
    }
    run_lists.finish(p, item, thread);
    entries.loaded -= item.tiles;
    item = next;
  }
}

// Sums over the heads of each of a warp's queries, of which a lane has rows lane / 4 and lane / 4 + 8 at 16 keys.
// Leaves two keys to a lane, 8 apart; the order of additions is that of a query by itself (add_heads of listed_keys).
template <int kQueries>
struct HeadSums {
  static constexpr int kOwn = kQueries / kWarpsPerWarpgroup;
  float of[kOwn][8];

  // `weights`: an accumulator; i is key i / 4 * 8 + lane % 4 * 2 + i % 2 of row lane / 4 + i / 2 % 2 * 8.
  template <class Weights>
  __device__ __forceinline__ HeadSums(const Weights& weights, int lane) {
    const bool odd = lane & 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float own[2], other[2];  // rows of this lane, and of that with the neighboring heads, at the keys that it keeps
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float even_key = weights(4 * j + 2 * r), odd_key = weights(4 * j + 2 * r + 1);
        own[r] = odd ? odd_key : even_key;
        other[r] = __shfl_xor_sync(~0u, odd ? even_key : odd_key, 4);
      }
      if constexpr (kOwn == 1) {
        of[0][j] = own[0] + other[0] + (odd ? other[1] : own[1]) + (odd ? own[1] : other[1]);
      } else {
        of[0][j] = own[0] + other[0];
        of[1][j] = own[1] + other[1];
      }
    }
#pragma unroll
    for (int left = 4; left >= 2; left /= 2) {
      const int lanes = 32 / left;  // 8, then 16
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < left; ++j) {
          const float low = of[i][j], high = of[i][j + left];
          of[i][j] = (lane & lanes ? high : low) + __shfl_xor_sync(~0u, lane & lanes ? low : high, lanes);
        }
      }
    }
  }
  // The lane's first key, in the half lane / 8 % 2 of the tile.
  static __device__ __forceinline__ int first_key(int lane) { return lane / 16 * 16 + lane % 4 * 2 + lane / 4 % 2; }
};

template <RunConfig kC>
__device__ __forceinline__ void score_runs(RunStorage<kC>& shared, const RunParams& p, int warpgroup, int thread) {
  using namespace cute;
  constexpr int kParts = kC.parts(), kSteps = kC.part_steps();
  using Sums = HeadSums<kC.queries>;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int matrix_row = warp * 16 + lane % 16, matrix_piece = lane / 16;
  const float scale = p.sm_scale * kLog2E;

  ScoreMmaFromRegisters mma;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kParts * kSteps>>{});
  uint32_t* q_words = reinterpret_cast<uint32_t*>(r_q.data());
  Tensor r_s = partition_fragment_C(mma, Shape<_64, _64>{});
  const Tensor r_keys = mma.get_slice(thread).partition_fragment_B(
      make_tensor(make_smem_ptr(shared.keys[0]),
                  tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{}, Shape<_64, Int<kC.columns>, Int<kC.tiles()>>{})));

  Ring<kC.tiles()> ring;
  Ring<kC.listed_slots()> listed_ring;
  const auto skip = [&] { ring.advance(), listed_ring.advance(); };  // a tile of the other warpgroup
  if (warpgroup == 1) skip();
  int place = warpgroup;  // of this warpgroup's next tile, in the item
  const Runs runs(p);
  int next = runs.load(blockIdx.x);
  for (int index = blockIdx.x; index < runs.count; index += gridDim.x) {
    const RunItem item(p, next);
    next = runs.load(index + gridDim.x);
    wait(&shared.listed_full[listed_ring.slot], listed_ring.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wait(&shared.full[ring.slot][part], ring.parity);
      const uint32_t s_part = shared_address(shared.keys[ring.slot]) + part * kC.part_chunks() * kChunkBytes;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t words[4];
        load_matrices(s_part + step / 4 * kChunkBytes + swizzled_offset(matrix_row, step % 4 * 2 + matrix_piece),
                      words);
#pragma unroll
        for (int i = 0; i < 4; ++i) q_words[4 * (part * kSteps + step) + i] = words[i];
      }
    }
    fence_async_proxy();  // Q has been read
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) arrive(&shared.empty[ring.slot][part]);
    }
    ring.advance();
    listed_ring.advance();
    skip();

    float bases[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + 8 * r, query = row / kC.rows_of_query(), head = row % kC.rows_of_query();
      const float* g_lse = p.head_factors + item.b * p.head_factors_stride_b + item.s * p.head_factors_stride_s;
      bases[r] = query < item.queries
                     ? base_of_lse(g_lse[query * p.head_factors_stride_s + head * p.head_factors_stride_h])
                     : -INFINITY;
    }
    const int own_query = warp * Sums::kOwn;
    float* const g_rows = item.row(p, own_query);

    int tile = place;
    for (; tile < item.tiles; tile += kScoreWarpgroups) {
      wait(&shared.listed_full[listed_ring.slot], listed_ring.parity);
      ListedHalf listed[Sums::kOwn];
#pragma unroll
      for (int i = 0; i < Sums::kOwn; ++i) listed[i] = shared.listed[listed_ring.slot][own_query + i][lane / 8 % 2];
      const auto release = [&](int part) {
        if (lane == 0) arrive(&shared.empty[ring.slot][part]);
      };
      warpgroup_fence_operand(r_s);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        wait(&shared.full[ring.slot][part], ring.parity);
        fence_async_proxy();
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          gemm(mma, r_q(_, _, part * kSteps + step), r_keys(_, _, part * kSteps + step, ring.slot), r_s);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        if (part > 0) {
          warpgroup_wait<1>();
          release(part - 1);
        }
      }
      warpgroup_wait<0>();
      release(kParts - 1);
      warpgroup_fence_operand(r_s);
      ring.advance();
      listed_ring.advance();
      skip();

#pragma unroll
      for (int i = 0; i < size(r_s); ++i) r_s(i) = exp2_fast(fmaf(r_s(i), scale, bases[i / 2 % 2]));
      const Sums sums(r_s, lane);
#pragma unroll
      for (int i = 0; i < Sums::kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t bit = 1u << (Sums::first_key(lane) + 8 * j);
          if ((listed[i].entries & bit) == 0) continue;
          g_rows[int64_t{i} * p.topk + listed[i].slot + __popc(listed[i].entries & bit - 1)] = sums.of[i][j];
        }
      }
    }
    place = tile - item.tiles;
  }
}

template <int kColumns, int kQueries>
__global__ void __launch_bounds__(kRunThreads, 1)
    attn_dist_runs_kernel(const __grid_constant__ RunParams p, const __grid_constant__ CUtensorMap q_map) {
  constexpr RunConfig kC{kColumns, kQueries};
  extern __shared__ __align__(1024) char shared_bytes_[];
  RunStorage<kC>& shared = *reinterpret_cast<RunStorage<kC>*>(shared_bytes_);
  if (static_cast<int>(blockIdx.x) >= Runs(p).count) return;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    for (int i = 0; i < kC.tiles() * kC.parts(); ++i) {
      barrier_init(&shared.full[0][i], kWarpgroupThreads);
      barrier_init(&shared.empty[0][i], kWarpsPerWarpgroup);
    }
    for (uint64_t& barrier : shared.entries_full) barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.listed_full) barrier_init(&barrier, kWarpsPerWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup < kScoreWarpgroups) {
    grow_registers<kScoreRegisters>();
    score_runs<kC>(shared, p, warpgroup, thread);
  } else {
    shrink_registers<kGatherRegisters>();
    gather_runs<kC>(shared, p, q_map, thread);
  }
}

}  // namespace dsa::attn_dist
