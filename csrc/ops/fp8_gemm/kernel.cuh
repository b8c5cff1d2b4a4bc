// out = a b', e4m3 with block scales, for few rows of a: b is streamed once, and is the left operand of the products,
// so that its rows meet 8 to 64 rows of a as columns.
//
// One warp copies the matrices and one their scales, and two warpgroups take blocks of 128 columns in turn, each with
// sums of its own: one multiplies while the other scales and adds what it has. Where b has few rows, a cluster shares
// the columns. All parts of a tile's sums go to shared memory, and are added up, there or through distributed shared
// memory, in a fixed order. docs/fp8.md has the maths.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "params.h"
#include "sm90/cluster.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::fp8_gemm {

using namespace dsa::sm90;
using Fp8 = cute::float_e4m3_t;

inline constexpr int kTileWidth = 64;  // rows of b
inline constexpr int kStages = 10;
inline constexpr int kTeams = 2;  // warpgroups that compute
inline constexpr int kComputeThreads = kTeams * kWarpgroupThreads;
inline constexpr int kThreads = kComputeThreads + 2 * kWarpThreads;
inline constexpr int kPitch = kTileWidth + 4;  // floats of a row of sums, so that lanes' rows do not share banks
static_assert(kStages % kTeams == 0);

template <int kRows>
struct SharedStorage {
  alignas(1024) Fp8 b[kStages][kTileWidth * kBlock];
  alignas(1024) Fp8 a[kStages][kRows * kBlock];
  alignas(16) float sums[kTeams][kRows][kPitch];
  float a_scales[kStages][kRows], b_scale[kStages];
  uint64_t full[kStages], empty[kStages];
};

// cp.async of 4 bytes; writes a zero and reads nothing where `exists` is false
__device__ __forceinline__ void copy_float(float* shared, const float* g, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(g), "r"(exists ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void sync_compute() { asm volatile("bar.sync 1, %0;" ::"n"(kComputeThreads) : "memory"); }

// The tiles of a cluster, and its CTA's blocks of columns.
struct Work {
  int splits, rank;  // of a cluster: how many CTAs, and which
  int first_tile, tiles, step;
  int first_block, blocks;

  __device__ __forceinline__ Work(const Params& p, int splits) : splits(splits), rank(blockIdx.x % splits) {
    const int all = p.columns / kBlock;
    first_tile = blockIdx.x / splits, tiles = (p.width - 1) / kTileWidth + 1, step = gridDim.x / splits;
    first_block = all * rank / splits, blocks = all * (rank + 1) / splits - first_block;
  }
};

// By one thread.
template <int kRows>
__device__ __forceinline__ void copy_matrices(SharedStorage<kRows>& shared, const CUtensorMap& a_map,
                                              const CUtensorMap& b_map, const Work& work) {
  Ring<kStages> ring;
  for (int tile = work.first_tile; tile < work.tiles; tile += work.step) {
    for (int block = work.first_block; block < work.first_block + work.blocks; ++block) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      uint64_t* full = &shared.full[ring.slot];
      arrive_and_expect(full, (kTileWidth + kRows) * kBlock);
      tma_load_once(shared.b[ring.slot], &b_map, {block * kBlock, 0, 0, tile * kTileWidth, 0}, full);
      tma_load(shared.a[ring.slot], &a_map, {block * kBlock, 0, 0, 0, 0}, full);
      ring.advance();
    }
  }
}

template <int kRows>
__device__ __forceinline__ void copy_scales(SharedStorage<kRows>& shared, const Params& p, const Work& work, int lane) {
  constexpr int kOfLane = (kRows + kWarpThreads - 1) / kWarpThreads;
  const float* a_scales[kOfLane];
  bool exists[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int row = lane + i * kWarpThreads;
    exists[i] = row < p.rows;
    a_scales[i] = p.a_scales + (exists[i] ? row : 0) * p.a_scales_stride_row;
  }
  Ring<kStages> ring;
  for (int tile = work.first_tile; tile < work.tiles; tile += work.step) {
    const float* b_scale = p.b_scales + tile * kTileWidth / kBlock * p.b_scales_stride_row;
    for (int block = work.first_block; block < work.first_block + work.blocks; ++block) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      if (lane == 0) copy_float(&shared.b_scale[ring.slot], b_scale + block * p.b_scales_stride_block, true);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int row = lane + i * kWarpThreads;
        if (row >= kRows) continue;
        copy_float(&shared.a_scales[ring.slot][row], a_scales[i] + block * p.a_scales_stride_block, exists[i]);
      }
      arrive_after_copies(&shared.full[ring.slot]);
      ring.advance();
    }
  }
}

// Adds up what all teams of all CTAs have of this CTA's share of the rows, and stores it.
template <int kRows>
__device__ __forceinline__ void store(SharedStorage<kRows>& shared, const Params& p, const Work& work, int tile) {
  constexpr int kQuads = kTileWidth / 4;
  const int share = (kRows + work.splits - 1) / work.splits, first = work.rank * share;
  for (int i = threadIdx.x; i < share * kQuads; i += kComputeThreads) {
    const int row = first + i / kQuads, width = tile * kTileWidth + i % kQuads * 4;
    if (row >= p.rows || width >= p.width) continue;
    float4 sum{};
    for (int other = 0; other < work.splits; ++other) {
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const float* place = &shared.sums[team][row][i % kQuads * 4];
        const float4 part = work.splits == 1 ? *reinterpret_cast<const float4*>(place) : read_remote(place, other);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    }
    const uint2 quad{pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
    auto* g_out = reinterpret_cast<__nv_bfloat16*>(p.out) + int64_t{row} * p.width + width;
    if (p.width % 4 == 0) {
      *reinterpret_cast<uint2*>(g_out) = quad;
    } else {
      const auto* values = reinterpret_cast<const __nv_bfloat16*>(&quad);
      for (int j = 0; j < min(4, p.width - width); ++j) g_out[j] = values[j];
    }
  }
}

template <int kRows>
__device__ __forceinline__ void compute(SharedStorage<kRows>& shared, const Params& p, const Work& work, int team,
                                        int thread) {
  using namespace cute;
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

  const int lane = thread % kWarpThreads;
  Ring<kStages> ring;
  ring.advance(team);
  int turn = 0;  // whose the tile's first block is
  for (int tile = work.first_tile; tile < work.tiles; tile += work.step) {
    clear(r_sum);
    for (int i = turn == team ? 0 : 1; i < work.blocks; i += kTeams) {
      wait(&shared.full[ring.slot], ring.parity);
      warpgroup_fence_operand(r_part);
      warpgroup_arrive();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int step = 0; step < size<2>(r_b); ++step) {
        gemm(mma, r_b(_, 0, step, ring.slot), r_a(_, 0, step, ring.slot), r_part(_, 0, 0));
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      // While the product runs: of 8 columns, a lane has two.
      const float b_scale = shared.b_scale[ring.slot];
      float2 scales[kRows / 8];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        scales[j] = *reinterpret_cast<const float2*>(&shared.a_scales[ring.slot][8 * j + lane % 4 * 2]);
        scales[j].x *= b_scale, scales[j].y *= b_scale;
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_part);
      arrive(&shared.empty[ring.slot]);
      ring.advance(kTeams);
#pragma unroll
      for (int j = 0; j < r_sum.size(); ++j) {
        r_sum(j) = fmaf(r_part(j), j % 2 ? scales[j / 4].y : scales[j / 4].x, r_sum(j));
      }
    }
    turn = (turn + work.blocks) % kTeams;

    sync_compute();  // the last tile's sums have been read
#pragma unroll
    for (int j = 0; j < r_sum.size(); ++j) {
      const int row = j / 4 * 8 + lane % 4 * 2 + j % 2, width = thread / kWarpThreads * 16 + lane / 4 + j / 2 % 2 * 8;
      shared.sums[team][row][width] = r_sum(j);
    }
    if (work.splits == 1) {
      sync_compute();
    } else {  // which has one tile
      cute::cluster_arrive();
      cute::cluster_wait();
    }
    store(shared, p, work, tile);
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap a_map,
                    const __grid_constant__ CUtensorMap b_map, int splits) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kRows>*>(shared_bytes);
  if (threadIdx.x == kComputeThreads) {
    prefetch_tensor_map(&a_map), prefetch_tensor_map(&b_map);
    for (uint64_t& barrier : shared.full) barrier_init(&barrier, 1 + kWarpThreads);
    for (uint64_t& barrier : shared.empty) barrier_init(&barrier, kWarpgroupThreads);
    fence_barrier_init();
  }
  __syncthreads();
  const Work work(p, splits);
  if (threadIdx.x < kComputeThreads) {
    const int team = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    compute(shared, p, work, team, threadIdx.x % kWarpgroupThreads);
  } else {
    const int thread = threadIdx.x - kComputeThreads;
    if (thread == 0) copy_matrices(shared, a_map, b_map, work);
    if (thread >= kWarpThreads) copy_scales(shared, p, work, thread - kWarpThreads);
    __syncwarp();
    if (splits > 1) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }
  if (splits > 1) {  // nobody's sums are read any more
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

}  // namespace dsa::fp8_gemm
