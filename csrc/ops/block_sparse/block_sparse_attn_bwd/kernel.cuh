// All gradients. Warp specialization: two streams on each SM, each a compute warpgroup with shared memory of its own
// and a copying warp.
//
//   role     threads                     registers  does                                   waits on         signals
//   compute  warpgroups 0, 1             224        dk, dv and dS of a block of keys, or   full             empty,
//   counters
//                                                   dq of a block of queries, from dS
//   copy     warps 0, 1 of warpgroup 2   56         takes items, loads their blocks (TMA)  empty, counters  full
//
// Counters in global memory say when a unit (plan.h) is done; only the copying warps wait for them.
#pragma once

#include "copy.cuh"
#include "key_gradients.cuh"
#include "query_gradients.cuh"
#include "sm90/programmatic.cuh"

namespace dsa::block_sparse_attn_bwd {

template <int kColumns>
__device__ __forceinline__ void compute(Stream<kColumns>& shared, const Params& p, const Maps& maps, int thread) {
  Walk<Stream<kColumns>::kSlots> walk;
  for (;;) {
    wait(&shared.full[walk.slot], walk.parity());
    const Kind kind = shared.headers[walk.slot].kind;
    if (kind == kStop) return;
    if (kind == kKeys) {
      compute_keys<kColumns>(shared, walk, p, maps, thread);
    } else {
      compute_queries<kColumns>(shared, walk, p, maps, thread);
    }
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& streams = *reinterpret_cast<Stream<kColumns>(*)[kStreams]>(shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& stream : streams) stream.init();
    fence_barrier_init();
    for (const CUtensorMap* map : {&maps.q, &maps.dout, &maps.k, &maps.v, &maps.dq, &maps.dk, &maps.dv}) {
      prefetch_tensor_map(map);
    }
  }
  __syncthreads();
  wait_for_preceding_kernel();
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup < kStreams) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute(streams[warpgroup], p, maps, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0);
    if (warp < kStreams) copy(streams[warp], p, maps, thread % kWarpThreads);
  }
}

}  // namespace dsa::block_sparse_attn_bwd
