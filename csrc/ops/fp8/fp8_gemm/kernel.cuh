// out = a b^T in e4m3 with block scales, for few rows of a: b is streamed once, as the left (M) operand of wgmma, and 8
// to 64 rows of a are its N dimension. Math: docs/fp8/fp8_gemm.md.
//
// Warp specialization without setmaxnreg. Who does what:
//
//   role           warps             does                                                      waits on   signals
//   compute 0, 1   warpgroups 0, 1   every other block of 128 columns: product, scale, add     full       empty
//                                    end of a tile: team 1 passes its sums to team 0           named barrier
//                                    with splits > 1: sums over the cluster                    cluster barrier
//   copy matrices  warp 8, 1 thread  tiles of a and b (TMA)                                    empty      full
//   copy scales    warp 9            their scales (cp.async)                                   empty      full
//
// Each team has its own sums: one multiplies while the other scales and adds. If b has few rows, a cluster splits the
// columns (split-K) and adds up its CTAs' sums through distributed shared memory. All sums are in a fixed order.
// Programmatic dependent launch (PDL): all roles wait for the preceding kernel.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "params.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"

namespace dsa::fp8_gemm {

using namespace dsa::sm90;
using namespace dsa::tiles;
using Fp8 = cute::float_e4m3_t;

inline constexpr int kTileWidth = 64;  // rows of b in a tile, at most
inline constexpr int kStages = 10;
inline constexpr int kTeams = 2;  // warpgroups that compute
inline constexpr int kComputeThreads = kTeams * kWarpgroupThreads;
inline constexpr int kThreads = kComputeThreads + 2 * kWarpThreads;
inline constexpr int kGroup = 8;  // rows of a in a group, of which a lane has four products: two rows of a by two of b
static_assert(kStages % kTeams == 0);

// How the work is split.
struct Cut {
  int width, tiles;  // width: rows of b in a tile, a multiple of 8
  int splits;        // CTAs per cluster, which split the columns; a power of two
  int clusters;      // they take tiles in turn
};

template <int kRows>
struct SharedStorage {
  alignas(1024) Fp8 b[kStages][kTileWidth * kBlock];
  alignas(1024) Fp8 a[kStages][kRows * kBlock];
  float4 sums[kRows / kGroup][kWarpgroupThreads];        // a lane's four of each group
  float a_scales[kStages][kRows], b_scales[kStages][2];  // b_scales: of the first and the last row of a tile
  uint64_t full[kStages], empty[kStages];
};

__device__ __forceinline__ void sync_compute() { sync_threads<1, kComputeThreads>(); }

// The CTA's blocks of columns, of all tiles of its cluster.
struct Work : Cut {
  int rank, first_tile, first_block, blocks;

  __device__ __forceinline__ Work(const Params& p, const Cut& cut)
      : Cut(cut), rank(cluster_rank()), first_tile(cluster_index()) {
    const auto blocks_before = [&](int rank) { return p.columns / kBlock * rank >> (__ffs(splits) - 1); };
    first_block = blocks_before(rank), blocks = blocks_before(rank + 1) - first_block;
  }
};

// Producer. Run by one thread.
template <int kRows>
__device__ __forceinline__ void copy_matrices(SharedStorage<kRows>& shared, const CUtensorMap& a_map,
                                              const CUtensorMap& b_map, const Work& work) {
  Ring<kStages> ring;
  for (int tile = work.first_tile; tile < work.tiles; tile += work.clusters) {
#pragma unroll 1
    for (int block = work.first_block; block < work.first_block + work.blocks; ++block) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      uint64_t* full = &shared.full[ring.slot];
      arrive_and_expect(full, (work.width + kRows) * kBlock);
      tma_load_once(shared.b[ring.slot], &b_map, {block * kBlock, 0, 0, tile * work.width, 0}, full);
      tma_load(shared.a[ring.slot], &a_map, {block * kBlock, 0, 0, 0, 0}, full);
      ring.advance();
    }
  }
}

template <int kRows>
__device__ __forceinline__ void copy_scales(SharedStorage<kRows>& shared, const Params& p, const Work& work, int lane) {
  Ring<kStages> ring;
  for (int tile = work.first_tile; tile < work.tiles; tile += work.clusters) {
    const int b_row = min(tile * work.width + (lane == 0 ? 0 : work.width - 1), p.width - 1);
    const float* b_scale =
        p.b_scales + b_row / kBlock * p.b_scales_stride_row + work.first_block * p.b_scales_stride_block;
    const float* a_scale = p.a_scales + lane * p.a_scales_stride_row + work.first_block * p.a_scales_stride_block;
#pragma unroll 1
    for (int i = 0; i < work.blocks; ++i) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      if (lane < 2) copy_float(&shared.b_scales[ring.slot][lane], b_scale);
#pragma unroll
      for (int first = 0; first < kRows; first += kWarpThreads) {
        if (first + lane >= p.rows) continue;
        copy_float(&shared.a_scales[ring.slot][first + lane], a_scale + first * p.a_scales_stride_row);
      }
      arrive_after_copies(&shared.full[ring.slot]);
      ring.advance();
      b_scale += p.b_scales_stride_block, a_scale += p.a_scales_stride_block;
    }
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

// Transposes a warp's products of a group with its 16 rows of b, in shared memory, into rows of the output.
struct Transposed {
  uint2* place;  // the warp's, for 8 rows of 16 bf16
  int lane;

  __device__ __forceinline__ void put(const float4& sums) const {
    const uint32_t address = shared_address(place) + lane % 8 * 32 + lane / 8 % 2 * 16;
    store_two_matrices_transposed(address, pack_bf16(sums.x, sums.y), pack_bf16(sums.z, sums.w));
  }
  // Each lane stores four columns of its row.
  __device__ __forceinline__ void store(const Params& p, const Work& work, int tile, int first_row, int warp) const {
    const int row = first_row + lane / 4, in_tile = warp * 16 + lane % 4 * 4, column = tile * work.width + in_tile;
    const int columns = min(work.width - in_tile, p.width - column);
    if (row >= p.rows || columns <= 0) return;
    const uint2 four = place[lane];
    auto* g_out = reinterpret_cast<__nv_bfloat16*>(p.out) + int64_t{row} * p.width + column;
    if (p.width % 4 == 0) {
      *reinterpret_cast<uint2*>(g_out) = four;
    } else {
      const auto* values = reinterpret_cast<const __nv_bfloat16*>(&four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < columns) g_out[i] = values[i];
      }
    }
  }
};

template <int kRows>
__device__ __forceinline__ void compute(SharedStorage<kRows>& shared, const Params& p, const Work& work, int team,
                                        int thread) {
  using namespace cute;
  constexpr int kGroups = kRows / kGroup;
  using Atom = GMMA::Layout_K_SW128_Atom<Fp8>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Fp8, Fp8, float, Shape<_64, Int<kRows>, _32>, GMMA::Major::K, GMMA::Major::K>()));
  Mma mma;
  const auto slice = mma.get_slice(thread);
  const Tensor r_b = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.b[0]), tile_to_shape(Atom{}, Shape<Int<kTileWidth>, Int<kBlock>, Int<kStages>>{})));
  const Tensor r_a = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.a[0]), tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kBlock>, Int<kStages>>{})));
  Tensor r_part = partition_fragment_C(mma, Shape<_64, Int<kRows>>{});
  Tensor r_sum = make_fragment_like(r_part);

  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int own_width = warp * 16 + lane / 4;  // a lane's rows of b: this and + 8
  Ring<kStages> ring;
  ring.advance(team);
  int turn = 0;  // the team that takes the tile's first block
  for (int tile = work.first_tile; tile < work.tiles; tile += work.clusters) {
    clear(r_sum);
    // Whether a row's scale is that of the tile's first row, or of the next block of rows.
    const int in_block = tile * work.width % kBlock + own_width,
              in_next[2] = {in_block >= kBlock, in_block + 8 >= kBlock};
    for (int i = turn == team ? 0 : 1; i < work.blocks; i += kTeams) {
      wait(&shared.full[ring.slot], ring.parity);
      warpgroup_fence_operand(r_part);
      warpgroup_arrive();
      multiply(mma, r_b(_, 0, _, ring.slot), r_a(_, 0, _, ring.slot), r_part(_, 0, 0));
      warpgroup_commit_batch();
      // Overlaps with the product.
      const float b_scales[2] = {shared.b_scales[ring.slot][in_next[0]], shared.b_scales[ring.slot][in_next[1]]};
      float2 a_scales[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        a_scales[group] = *reinterpret_cast<const float2*>(&shared.a_scales[ring.slot][8 * group + lane % 4 * 2]);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_part);
      arrive(&shared.empty[ring.slot]);
      ring.advance(kTeams);
#pragma unroll
      for (int j = 0; j < r_sum.size(); ++j) {
        r_sum(j) = fmaf(r_part(j), (j % 2 ? a_scales[j / 4].y : a_scales[j / 4].x) * b_scales[j / 2 % 2], r_sum(j));
      }
    }
    turn = (turn + work.blocks) % kTeams;

    const auto sums = [&](int group) {
      return make_float4(r_sum(4 * group), r_sum(4 * group + 1), r_sum(4 * group + 2), r_sum(4 * group + 3));
    };
    const auto transposed = [&](int group) {
      return Transposed{reinterpret_cast<uint2*>(&shared.sums[group][warp * kWarpThreads]), lane};
    };
    sync_compute();  // all have read the sums of the tile before
    if (team == 1) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) shared.sums[group][thread] = sums(group);
    }
    sync_compute();
    if (team == 0) {
      float4 all[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        all[group] = sums(group), add(all[group], shared.sums[group][thread]);
      __syncwarp();
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (work.splits == 1) {
          transposed(group).put(all[group]);
        } else {
          shared.sums[group][thread] = all[group];
        }
      }
      __syncwarp();
      if (work.splits == 1) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) transposed(group).store(p, work, tile, group * kGroup, warp);
      }
    }
    if (work.splits > 1) {  // then there is one tile: each CTA adds up some groups of all
      cluster_arrive();
      cluster_wait();
      if (team == 1) continue;
      for (int group = work.rank; group < kGroups; group += work.splits) {
        float4 sum{};
        for (int other = 0; other < work.splits; ++other) add(sum, read_remote(&shared.sums[group][thread].x, other));
        __syncwarp();  // nobody else reads this CTA's sums of the group
        transposed(group).put(sum);
        __syncwarp();
        transposed(group).store(p, work, tile, group * kGroup, warp);
      }
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap a_map,
                    const __grid_constant__ CUtensorMap b_map, const __grid_constant__ Cut cut) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kRows>*>(shared_bytes);
  if (threadIdx.x == kComputeThreads) {
    prefetch_tensor_map(&a_map), prefetch_tensor_map(&b_map);
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1 + kWarpThreads);
    for (uint64_t& barrier : shared.empty) barrier_init(&barrier, kWarpgroupThreads);
    fence_barrier_init();
  }
  launch_dependents();
  __syncthreads();
  wait_for_preceding_kernel();
  const Work work(p, cut);
  if (threadIdx.x < kComputeThreads) {
    const int team = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    compute(shared, p, work, team, threadIdx.x % kWarpgroupThreads);
  } else {
    const int thread = threadIdx.x - kComputeThreads;
    if (thread == 0) copy_matrices(shared, a_map, b_map, work);
    if (thread >= kWarpThreads) copy_scales(shared, p, work, thread - kWarpThreads);
    __syncwarp();
    if (cut.splits > 1) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }
  if (cut.splits > 1) {  // all CTAs have read the others' sums
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

}  // namespace dsa::fp8_gemm
