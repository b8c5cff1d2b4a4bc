// out = a b', e4m3 with block scales, for few rows of a: b is streamed once, and is the left operand of the products,
// so that its 64 rows of a CTA meet 8 to 64 rows of a as columns. A cluster shares the reduction: each CTA has a run of
// it, and they add up their sums through distributed shared memory, in a fixed order. docs/fp8.md has the maths.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::fp8_gemm {

using namespace dsa::sm90;
using Fp8 = cute::float_e4m3_t;

inline constexpr int kTileWidth = 64;  // rows of b of a CTA
inline constexpr int kStages = 6;
inline constexpr int kThreads = kWarpgroupThreads + kWarpThreads;  // that compute, and a warp that copies

template <int kRows>
struct SharedStorage {
  union {
    alignas(1024) Fp8 b[kStages][kTileWidth * kBlock];
    float sums[kRows / 2][kWarpgroupThreads];  // at the end: accumulators, as a thread has them
  };
  alignas(1024) Fp8 a[kStages][kRows * kBlock];
  float a_scales[kStages][kRows], b_scale[kStages];
  uint64_t full[kStages], empty[kStages];
};

// cp.async of 4 bytes; writes a zero and reads nothing where `exists` is false
__device__ __forceinline__ void copy_float(float* shared, const float* g, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(g), "r"(exists ? 4 : 0)
               : "memory");
}

// The float at the same place of another CTA's shared memory.
__device__ __forceinline__ float remote_float(const float& place, int rank) {
  uint32_t address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(&place)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

struct Run {
  int first, end;  // blocks of columns
};

template <int kRows>
__device__ __forceinline__ void copy(SharedStorage<kRows>& shared, const Params& p, const CUtensorMap& a_map,
                                     const CUtensorMap& b_map, int first_width, Run run, int lane) {
  Ring<kStages> ring;
  for (int block = run.first; block < run.end; ++block) {
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    uint64_t* full = &shared.full[ring.slot];
    if (lane == 0) {
      arrive_and_expect(full, (kTileWidth + kRows) * kBlock);
      tma_load(shared.b[ring.slot], &b_map, {block * kBlock, 0, 0, first_width, 0}, full);
      tma_load(shared.a[ring.slot], &a_map, {block * kBlock, 0, 0, 0, 0}, full);
      const int64_t scale = first_width / kBlock * p.b_scales_stride_row + block * p.b_scales_stride_block;
      copy_float(&shared.b_scale[ring.slot], p.b_scales + scale, true);
    }
    for (int row = lane; row < kRows; row += kWarpThreads) {
      const bool exists = row < p.rows;
      const int64_t scale = (exists ? row : 0) * p.a_scales_stride_row + block * p.a_scales_stride_block;
      copy_float(&shared.a_scales[ring.slot][row], p.a_scales + scale, exists);
    }
    arrive_after_copies(full);
    __syncwarp();
    ring.advance();
  }
}

template <int kRows>
__device__ __forceinline__ void compute(SharedStorage<kRows>& shared, const Params& p, int first_width, Run run,
                                        int rank, int splits, int thread) {
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
  clear(r_sum);

  const int lane = thread % kWarpThreads;
  Ring<kStages> ring;
  for (int block = run.first; block < run.end; ++block) {
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
    for (int i = 0; i < kRows / 8; ++i) {
      scales[i] = *reinterpret_cast<const float2*>(&shared.a_scales[ring.slot][8 * i + lane % 4 * 2]);
      scales[i].x *= b_scale, scales[i].y *= b_scale;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_part);
    arrive(&shared.empty[ring.slot]);
    ring.advance();
#pragma unroll
    for (int i = 0; i < r_sum.size(); ++i) {
      r_sum(i) = fmaf(r_part(i), i % 2 ? scales[i / 4].y : scales[i / 4].x, r_sum(i));
    }
  }

  // Each CTA adds up a share of the accumulators of all, and stores it.
  if (splits > 1) {
    sync_warpgroup(1);  // the last tile has been read
    for (int i = 0; i < r_sum.size(); ++i) shared.sums[i][thread] = r_sum(i);
    cluster_arrive();
    cluster_wait();
  }
  const int share = (r_sum.size() + splits - 1) / splits;
  const int n = first_width + thread / kWarpThreads * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < r_sum.size(); ++i) {
    if (i / share != rank) continue;
    float sum = r_sum(i);
    if (splits > 1) {
      sum = 0.f;
      for (int other = 0; other < splits; ++other) sum += remote_float(shared.sums[i][thread], other);
    }
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, width = n + i / 2 % 2 * 8;
    if (row < p.rows && width < p.width) {
      static_cast<__nv_bfloat16*>(p.out)[static_cast<int64_t>(row) * p.width + width] = __float2bfloat16_rn(sum);
    }
  }
  if (splits > 1) {
    cluster_arrive();  // nobody's sums are read any more
    cluster_wait();
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    fp8_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap a_map,
                    const __grid_constant__ CUtensorMap b_map, int splits) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kRows>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1 + kWarpThreads);
      barrier_init(&shared.empty[i], kWarpgroupThreads);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int rank = static_cast<int>(blockIdx.x) % splits,
            first_width = static_cast<int>(blockIdx.x) / splits * kTileWidth;
  const int blocks = p.columns / kBlock;
  const Run run{blocks * rank / splits, blocks * (rank + 1) / splits};
  if (threadIdx.x < kWarpgroupThreads) {
    compute(shared, p, first_width, run, rank, splits, threadIdx.x);
  } else {
    copy(shared, p, a_map, b_map, first_width, run, threadIdx.x % kWarpThreads);
    if (splits > 1) {
      for (int i = 0; i < 2; ++i) {
        cute::cluster_arrive();
        cute::cluster_wait();
      }
    }
  }
}

}  // namespace dsa::fp8_gemm
