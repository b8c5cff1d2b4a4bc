// Common to both gradient kernels. Warp specialization: two streams, each a compute warpgroup with blocks and a ring
// buffer of its own and a producer warp.
//
//   role     threads                     registers  does                      waits on            signals
//   compute  warpgroups 0, 1             232        its stream's gradients    full; dk also       empty; dk also
//                                                                             item_full           item_empty
//   copy     warps 0, 1 of warpgroup 2   40         takes blocks, loads them  empty; dk also      full; dk also
//                                                   (TMA)                     item_empty          item_full
#pragma once

#include <cfloat>

#include "ops/block_sparse/lists.cuh"
#include "ops/block_sparse/operands.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/mma.cuh"

namespace dsa::block_sparse_attn_bwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kStreams = 2;
inline constexpr int kThreads = (kStreams + 1) * kWarpgroupThreads;
// Marks a query after the last, in place of the base of its probabilities (base_of_lse). Its row of Q is 0, and 0 times
// an infinite key is NaN, so the probabilities of such a query are set to 0.
inline constexpr float kMissingBase = -FLT_MAX;
inline constexpr int kComputeRegisters = 232, kCopyRegisters = 40, kStartRegisters = 168;

template <int kColumns>
using Tile = Bf16[kBlock * kColumns];

// Takes the next block from a global counter. Run by one warp.
__device__ __forceinline__ int take(int* taken, int lane) {
  int index = 0;
  if (lane == 0) index = atomicAdd(taken, 1);
  return __shfl_sync(~0u, index, 0);
}

// Converts a 64 x 64 accumulator fragment to an A operand of the next product.
template <class Scores, class Fragment>
__device__ __forceinline__ void to_operand(const Scores& r_s, Fragment& r_operand) {
  auto& pairs = *reinterpret_cast<uint32_t (*)[sizeof(r_s) / 8]>(r_operand.data());
#pragma unroll
  for (int i = 0; i < r_s.size() / 2; ++i) pairs[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
}

// Runs one role per warpgroup: compute(stream, thread) or copy(stream, lane).
template <class Streams, class Compute, class Copy>
__device__ __forceinline__ void run_roles(Streams& streams, const Compute& compute, const Copy& copy) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup < kStreams) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute(streams[warpgroup], thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0);
    if (warp < kStreams) copy(streams[warp], thread % kWarpThreads);
  }
}

}  // namespace dsa::block_sparse_attn_bwd
