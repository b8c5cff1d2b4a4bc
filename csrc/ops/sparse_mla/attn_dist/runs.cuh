// attn_dist of runs of neighboring queries whose lists are merged: a run's heads are the 64 rows of S = Q K^T.
//
// Warp specialization. Who does what:
//
//   role     warpgroups  registers  does                                           waits on           signals
//   score    0, 1        216        Q to registers; S of every other tile; sums    full, listed_full  empty
//                                   over the heads of each query, to its slots
//   gather   2           72         Q of an item, once for each score warpgroup    empty              full
//                                   keys of a tile, and which query lists them                        listed_full
//                                   zeros in the slots behind a query's keys
//
// A persistent CTA walks over runs. Q and keys pass through one ring buffer, in parts of some columns. The score
// warpgroups take its tiles, the two copies of Q among them, in turn. Keys and Q need not arrive in order, and a stage
// that the other warpgroup still waits for has the phase that this one waits for. So listed_full of a tile, for which a
// warpgroup waits first, is signaled when all stages of the tile have been released by those who had them before.
//
// Q in registers leaves shared memory to the keys: with Q there too, the ring would be too short to hide the latency of
// the gather, and products would read twice as much.
#pragma once

#include <cutlass/cutlass.h>

#include "ops/shared/listed_keys/items.cuh"
#include "ops/shared/merged_lists/params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/softmax.cuh"

namespace dsa::attn_dist {

using namespace dsa::tiles;

// One shape of the kernel. A run has 4 queries of 16 heads or 8 of 8.
struct RunConfig {
  int columns, queries;

  constexpr int rows_of_query() const { return kTileRows / queries; }
  constexpr int slot_chunks() const { return columns == 576 ? 3 : 2; }             // chunks of columns per stage
  constexpr int parts() const { return columns / kChunkColumns / slot_chunks(); }  // stages per tile
  constexpr int part_steps() const { return slot_chunks() * kChunkColumns / 16; }
  constexpr int slots() const { return 225 * 1024 / (slot_chunks() * kChunkBytes); }
  // A tile's lists are written when the last part of the tile before it has a stage. By then, tiles that are
  // slots() / parts() + 1 behind (rounded up) or more have been released.
  constexpr int listed_slots() const { return slots() / parts() + 2; }
};

inline constexpr int kScoreWarpgroups = 2, kRunThreads = 384;
// Per thread: 144 of Q, 32 of S and 40 others in the score warpgroups.
inline constexpr int kScoreRegisters = 216, kGatherRegisters = 72;

// Of each query and half of a tile's 64 entries: which of them the query lists, and how many of its keys come before.
// As the keys of a list ascend, that is the slot of the first one.
struct ListedHalf {
  uint32_t entries;
  int slot;
};
using ListedTile = ListedHalf[merged_lists::kMaxQueries][2];

template <RunConfig kC>
struct RunStorage {
  alignas(1024) Bf16 keys[kC.slots()][kC.slot_chunks() * kChunkElements];
  ListedTile listed[kC.listed_slots()];
  uint64_t full[kC.slots()], empty[kC.slots()];
  uint64_t listed_full[kC.listed_slots()];
};

struct RunParams : listed_keys::Params {
  merged_lists::Lists lists;
  int run_count;  // of a sequence
};

struct RunItem {
  int s, b, queries;  // from query s on
  const int* g_entries;
  int entries, tiles;  // at least one tile

  __device__ __forceinline__ RunItem(const RunParams& p, int listed) {
    const int first_query = ~listed;
    s = first_query % p.seq_q;
    b = first_query / p.seq_q;
    const int run = b * p.run_count + s / p.lists.queries - p.lists.first_run;
    queries = min(p.lists.queries, p.seq_q - s);
    g_entries = reinterpret_cast<const int*>(p.lists.entries) + static_cast<int64_t>(run) * p.lists.capacity;
    entries = __ldg(p.lists.counts + run);
    tiles = max(1, (entries + kTileRows - 1) / kTileRows);
  }
  __device__ __forceinline__ float* row(const RunParams& p, int query) const {
    return p.sums + (static_cast<int64_t>(b) * p.seq_q + s + query) * p.topk;
  }
};

// The merged runs of a launch.
struct Runs {
  int count;
  const int* g_items;

  __device__ __forceinline__ explicit Runs(const RunParams& p)
      : count(__ldg(p.lists.item_counts)), g_items(p.lists.items) {}
  // For RunItem; behind the last run that of the last.
  __device__ __forceinline__ int load(int index) const { return __ldg(g_items + min(index, count - 1)); }
};

// Writes which query lists what, tile by tile. Each warp of the gathering warpgroup has two queries of 8, or one of 4.
template <int kQueries>
struct RunLists {
  static constexpr int kOwn = kQueries / kWarpsPerWarpgroup;
  int slots[kOwn] = {};  // before the next tile
  uint32_t next[2];      // a lane's entries of the next tile, loaded ahead: its loads wait behind those of ids

  __device__ __forceinline__ void load(const RunItem& item, int tile, int thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = tile * kTileRows + half * kWarpThreads + thread % kWarpThreads;
      next[half] = place < item.entries ? __ldg(item.g_entries + place) : 0;
    }
  }
  // Called by all lanes.
  __device__ __forceinline__ void publish(ListedTile& listed, int thread) {
    const int lane = thread % kWarpThreads, first = thread / kWarpThreads * kOwn;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t entries = __ballot_sync(~0u, next[half] >> (merged_lists::kIdBits + first + i) & 1);
        if (lane == 0) listed[first + i][half] = {entries, slots[i]};
        slots[i] += __popc(entries);
      }
    }
  }
  // Clears the slots behind a query's keys.
  __device__ __forceinline__ void finish(const RunParams& p, const RunItem& item, int thread) {
    const int lane = thread % kWarpThreads, first = thread / kWarpThreads * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      for (int slot = slots[i] + lane; first + i < item.queries && slot < p.topk; slot += kWarpThreads) {
        item.row(p, first + i)[slot] = 0.f;
      }
      slots[i] = 0;
    }
  }
};

template <RunConfig kC>
__device__ __forceinline__ void gather_runs(RunStorage<kC>& shared, const RunParams& p, const CUtensorMap& q_map,
                                            int thread) {
  constexpr int kParts = kC.parts(), kChunks = kC.slot_chunks();
  const uint32_t piece_offset = swizzled_offset(gather_row(thread), gather_piece(thread));
  Ring<kC.slots()> ring;
  Ring<kC.listed_slots()> listed_ring;
  RunLists<kC.queries> run_lists;
  int ids[kGatherRowsPerThread];  // of the next tile
  const auto load_entries = [&](const RunItem& item, int tile) {
    run_lists.load(item, tile, thread);
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      const int place = tile * kTileRows + gather_row(thread) + i * kGatherRowStep;
      ids[i] = place < item.entries ? __ldg(item.g_entries + place) & int(merged_lists::kIdMask) : -1;
    }
  };
  const auto signal_listed = [&] {
    if (thread % kWarpThreads == 0) arrive(&shared.listed_full[listed_ring.slot]);
    listed_ring.advance();
  };
  const Runs runs(p);
  RunItem item(p, runs.load(blockIdx.x));
  load_entries(item, 0);
  for (int index = blockIdx.x; index < runs.count; index += gridDim.x) {
    const RunItem next(p, runs.load(index + gridDim.x));
#pragma unroll 1
    for (int copy = 0; copy < kScoreWarpgroups; ++copy) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        uint64_t* const full = &shared.full[ring.slot];
        wait(&shared.empty[ring.slot], ring.parity ^ 1);
        if (part == kParts - 1) signal_listed();
        if (thread == 0) {
          expect_bytes(full, kChunks * kChunkBytes);
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            tma_load(shared.keys[ring.slot] + chunk * kChunkElements, &q_map,
                     {(part * kChunks + chunk) * kChunkColumns, 0, 0, item.s, item.b}, full);
          }
        }
        arrive(full);
        ring.advance();
      }
    }
    const char* g_keys = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + item.b * p.kv_stride_b) +
                         gather_piece(thread) * 16;
    for (int tile = 0; tile < item.tiles; ++tile) {
      const GatherRows rows(g_keys, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, {0, p.seq_kv});
      run_lists.publish(shared.listed[listed_ring.slot], thread);
      if (tile + 1 < item.tiles) {
        load_entries(item, tile + 1);
      } else {
        load_entries(next, 0);
      }
      cute::for_each(cute::make_int_sequence<kParts>{}, [&](auto part) {
        constexpr int kBegin = part * kChunks;
        wait(&shared.empty[ring.slot], ring.parity ^ 1);
        if (part == kParts - 1) signal_listed();
        rows.template copy<kBegin, kBegin, kBegin + kChunks>(shared_address(shared.keys[ring.slot]) + piece_offset);
        arrive_after_copies(&shared.full[ring.slot]);
        ring.advance();
      });
    }
    run_lists.finish(p, item, thread);
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
                  tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{},
                                Shape<_64, Int<kC.slot_chunks() * kChunkColumns>, Int<kC.slots()>>{})));

  Ring<kC.slots()> ring;
  Ring<kC.listed_slots()> listed_ring;
  const auto skip = [&] { ring.advance(kParts), listed_ring.advance(); };  // a tile of the other warpgroup
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
      wait(&shared.full[ring.slot], ring.parity);
      const uint32_t s_part = shared_address(shared.keys[ring.slot]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t words[4];
        load_matrices(s_part + step / 4 * kChunkBytes + swizzled_offset(matrix_row, step % 4 * 2 + matrix_piece),
                      words);
#pragma unroll
        for (int i = 0; i < 4; ++i) q_words[4 * (part * kSteps + step) + i] = words[i];
      }
      ring.advance();
    }
    fence_async_proxy();  // Q has been read
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int slot = ring.slot - kParts + part;
        arrive(&shared.empty[slot < 0 ? slot + kC.slots() : slot]);
      }
    }
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
      int slot_before = 0;
      const auto release = [&](int slot) {
        if (lane == 0) arrive(&shared.empty[slot]);
      };
      warpgroup_fence_operand(r_s);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        wait(&shared.full[ring.slot], ring.parity);
        fence_async_proxy();
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          gemm(mma, r_q(_, _, part * kSteps + step), r_keys(_, _, step, ring.slot), r_s);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        if (part > 0) {
          warpgroup_wait<1>();
          release(slot_before);
        }
        slot_before = ring.slot;
        ring.advance();
      }
      warpgroup_wait<0>();
      release(slot_before);
      warpgroup_fence_operand(r_s);
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
    for (int i = 0; i < kC.slots(); ++i) {
      barrier_init(&shared.full[i], kWarpgroupThreads);
      barrier_init(&shared.empty[i], kWarpsPerWarpgroup);
    }
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
