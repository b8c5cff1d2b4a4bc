// Lightning indexer: logits[s, t] = k_scale[t] * sum_h relu(q[s, h].k[t]) * weights[s, h].
//
// Warp specialization. Who does what:
//
//   role      warps            registers  does                                     waits on    signals
//   multiply  warpgroups 0-3   112        scores of 64 keys x 128 rows of Q,       q_full,     keys_empty, q_empty
//                                         their weighted sums over heads, logits   keys_full
//   feed      warp 16          32         loads Q of a block of queries            q_empty     q_full (by TMA)
//                                         loads tiles of keys                      keys_empty  keys_full (by TMA)
//   clean     warps 17-19      32         writes -inf where no part is visited
//   collect   the same         32         moves logits above the bar to lists            full        empty
//
// A block of queries, whose heads are the rows of Q in shared memory, is multiplied with tiles of keys. The parts of
// tiles that the blocks see form one long list, of which each persistent CTA takes an equal run. Each multiply
// warpgroup keeps the weights of its own 128 rows in registers; while one computes sums, others multiply.
//
// For indexer_topk there are instances that list the logits above the bar of their row and store no others. They keep
// back a rest of the work for the CTAs that are done first.
//
// Programmatic dependent launch (PDL): all roles wait for the preceding kernel.
#pragma once

#include <cuda.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "above.cuh"
#include "config.h"
#include "heads.cuh"
#include "params.h"
#include "rest.cuh"
#include "runs.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/memory.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_logits {

using namespace dsa::tiles;

struct Nothing {};

// Params, and a division that the host has prepared.
struct KernelParams : Params {
  explicit KernelParams(const Params& params) : Params(params), ctas(num_sms) {}

  cutlass::FastDivmod ctas;
};

template <class Element, Config kC>
struct SharedStorage {
  alignas(1024) Element q[kC.rows() * kC.row_bytes / sizeof(Element)];
  alignas(1024) Element keys[kC.stages()][kTileKeys * kC.row_bytes / sizeof(Element)];
  int2 bounds[kMathThreads / 32][kC.pass_queries()];  // a copy per warp
  RunStorage<kThreads> plan;                          // items are blocks of queries
  using WarpFinds = Finds<kC.room(), kC.room() - kC.finds()>;
  std::conditional_t<kC.above, WarpFinds[kMathThreads / 32], Nothing> finds;
  RestRuns rest;
  alignas(8) uint64_t q_full, q_empty, keys_full[kC.stages()], keys_empty[kC.stages()];
};

// The first key of a query and the end of its keys; equal if it sees none.
__device__ __forceinline__ int2 bounds_of(const Params& p, int query) {
  const int begin = max(0, p.starts[query * p.starts_stride]), end = min(p.seq_kv, p.ends[query * p.ends_stride]);
  return {begin, max(begin, end)};
}

// The range of keys that any query of a block sees, the range that all see, and the parts of tiles of the former.
struct BlockRange {
  int begin = 0, end = 0;
  int common_begin = 0, common_end = 0;
  int first_part = 0, parts = 0;

  // Work is counted in units: one per part, and some for the start of a block.
  __device__ __forceinline__ int units() const { return parts > 0 ? kStartUnits + parts : 0; }
};

__device__ __forceinline__ BlockRange range_of_bounds(int begin, int end, int common_begin, int common_end) {
  if (begin >= end) return {};
  const int first_part = begin / kPartKeys;
  return {begin, end, common_begin, common_end, first_part, (end - 1) / kPartKeys + 1 - first_part};
}

// Called by all lanes of a warp.
__device__ __forceinline__ BlockRange range_of(const Params& p, int first_query, int queries) {
  int begin = INT_MAX, end = 0, common_begin = 0, common_end = INT_MAX;
  for (int i = threadIdx.x % 32; i < queries && first_query + i < p.seq; i += 32) {
    const int2 bounds = bounds_of(p, first_query + i);
    if (bounds.x < bounds.y) begin = min(begin, bounds.x), end = max(end, bounds.y);
    common_begin = max(common_begin, bounds.x), common_end = min(common_end, bounds.y);
  }
  return range_of_bounds(__reduce_min_sync(~0u, begin), __reduce_max_sync(~0u, end),
                         __reduce_max_sync(~0u, common_begin), __reduce_min_sync(~0u, common_end));
}

// Walks over a CTA's run, and those that `next_run()` returns until one is empty: calls `visit(block, range, first,
// end)` for parts [first, end) of each block.
template <class Element, Config kC, class NextRun, class Visit>
__device__ __forceinline__ void walk(const SharedStorage<Element, kC>& shared, const Params& p, NextRun next_run,
                                     Visit visit) {
  for (Run run = shared.plan.run; run.units > 0; run = next_run()) {
    int skip = run.skip, left = run.units;
    for (int block = run.item; left > 0 && block * kC.queries() < p.seq; ++block, skip = 0) {
      const BlockRange range = range_of(p, block * kC.queries(), kC.queries());
      const int end = min(range.units(), skip + left);
      left -= end - skip;
      const int first = max(skip - kStartUnits, 0), parts_end = end - kStartUnits;
      if (first < parts_end) visit(block, range, range.first_part + first, range.first_part + parts_end);
    }
  }
}

// Finds this CTA's run. Called by all threads. The thread index is read anew: if multiply shared quotients with this,
// the compiler would assume that they differ within a warp, and spill 600 bytes there.
template <class Element, Config kC>
__device__ __forceinline__ void plan(SharedStorage<Element, kC>& shared, const KernelParams& p, int blocks) {
  find_run<kC.above, kThreads>(shared.plan, blocks, p.ctas, sm90::thread_index(), [&](int block) {
    int begin = INT_MAX, end = 0;
#pragma unroll 8
    for (int i = 0; i < kC.queries(); ++i) {
      const int2 bounds = bounds_of(p, min(block * kC.queries() + i, p.seq - 1));
      if (bounds.x < bounds.y) begin = min(begin, bounds.x), end = max(end, bounds.y);
    }
    return range_of_bounds(begin, end, 0, 0).units();
  });
  __syncthreads();
}

// Producer: loads Q of each block and the tiles of keys. Run by one warp.
template <class Element, Config kC>
__device__ __forceinline__ void feed(SharedStorage<Element, kC>& shared, const Params& p, const CUtensorMap& q_map,
                                     const CUtensorMap& k_map, int blocks) {
  constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element);
  const bool leader = threadIdx.x % 32 == 0;
  RestGiver<kC.above> rest(shared.rest, p.above.tickets, shared.plan.rest);
  const auto next_run = [&] {
    return rest.next(blocks, [&](int block) { return range_of(p, block * kC.queries(), kC.queries()).units(); });
  };
  Ring<kC.stages()> ring;
  uint32_t q_parity = 1;  // the first Q need not wait
  walk(shared, p, next_run, [&](int block, const BlockRange&, int first_part, int end_part) {
    if (leader) {
      wait(&shared.q_empty, q_parity);
      arrive_and_expect(&shared.q_full, sizeof(shared.q));
      for (int c = 0; c < kC.chunks(); ++c) {
        tma_load(shared.q + c * kC.rows() * kChunkColumns, &q_map, {c * kChunkColumns, 0, 0, block * kC.queries(), 0},
                 &shared.q_full);
      }
    }
    q_parity ^= 1;
    for (int tile = first_part / kTileParts; tile * kTileParts < end_part; ++tile, ring.advance()) {
      if (!leader) continue;
      wait(&shared.keys_empty[ring.slot], ring.parity ^ 1);
      arrive_and_expect(&shared.keys_full[ring.slot], sizeof(shared.keys[0]));
      for (int c = 0; c < kC.chunks(); ++c) {
        tma_load(shared.keys[ring.slot] + c * kTileKeys * kChunkColumns, &k_map,
                 {c * kChunkColumns, 0, 0, tile * kTileKeys, 0}, &shared.keys_full[ring.slot]);
      }
    }
  });
}

// Writes -inf where no part of a tile lies. Run by `threads` threads in whole warps; `thread` is this one's index.
template <Config kC>
__device__ __forceinline__ void clean(const Params& p, int blocks, int thread, int threads) {
  const auto fill = [&](float* g_row, int begin, int end) {  // `begin` is a multiple of 4
    const int whole = begin + (end - begin) / 4 * 4;
    for (int i = begin + 4 * thread; i < whole; i += 4 * threads) {
      *reinterpret_cast<float4*>(g_row + i) = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    }
    if (whole + thread < end) g_row[whole + thread] = -INFINITY;
  };
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    const BlockRange range = range_of(p, block * kC.queries(), kC.queries());
    const int covered_begin = range.begin / kPartKeys * kPartKeys;
    const int covered_end = (range.end + kPartKeys - 1) / kPartKeys * kPartKeys;
    for (int query = block * kC.queries(); query < min(p.seq, (block + 1) * kC.queries()); ++query) {
      float* g_row = p.logits + query * p.logits_stride;
      fill(g_row, 0, covered_begin);
      fill(g_row, covered_end, p.seq_kv);
    }
  }
}

// Multiplies keys and sums over heads. `thread` is in [0, kMathThreads).
template <class Element, Config kC>
__device__ __forceinline__ void multiply(SharedStorage<Element, kC>& shared, const Params& p, int thread) {
  using namespace cute;
  constexpr int kColumns = kC.row_bytes / sizeof(Element);
  constexpr int kQueries = kC.queries(), kPassQueries = kC.pass_queries();
  using Atom = std::conditional_t<kC.chunk_bytes() == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kPassRows>, Int<32 / int(sizeof(Element))>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  const int lane = thread % 32, warp = thread / 32 % 4, warpgroup = cutlass::canonical_warp_group_idx();
  Mma mma;
  const auto slice = mma.get_slice(thread % 128);
  // Descriptors of all operands.
  const Tensor r_q = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.q), tile_to_shape(Atom{}, Shape<Int<kC.rows()>, Int<kColumns>>{})));
  const Tensor r_keys = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.keys[0]), tile_to_shape(Atom{}, Shape<Int<kTileKeys>, Int<kColumns>, Int<kC.stages()>>{})));
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kPassRows>>{});

  // Of the sums of a warp's 16 keys, a lane ends up with one key, for every other query.
  const int upper = lane >> 1 & 1, odd = lane & 1;
  const int lane_key = warp * 16 + upper * 8 + lane / 4;
  [[maybe_unused]] auto finder = [&] {
    if constexpr (kC.above) {
      return Finder<typename SharedStorage<Element, kC>::WarpFinds>{shared.finds[thread / 32]};
    } else {
      return Nothing{};
    }
  }();
  RestReader<kC.above> rest{shared.rest, shared.plan.rest.units > 0};
  const auto next_run = [&] { return rest.next(); };
  Ring<kC.stages()> ring;
  uint32_t q_parity = 0;
  walk(shared, p, next_run, [&](int block, const BlockRange& range, int first_part, int end_part) {
    // With fewer passes than warpgroups, several warpgroups take turns at the parts of a tile.
    const int first_query = block * kQueries, queries = min(kQueries, p.seq - first_query);
    const int passes = (queries + kPassQueries - 1) / kPassQueries;
    const int turns = kMathWarpgroups / passes, turn = warpgroup / passes, pass = warpgroup % passes;
    const int pass_query = first_query + pass * kPassQueries;
    // Of each 8 accumulator columns, lane l holds columns 2 (l % 4) and 2 (l % 4) + 1.
    float weights[kPassRows / 4];
#pragma unroll
    for (int i = 0; i < kPassRows / 4; ++i) {
      const int column = column_in_row(i, lane), query = pass_query + column / kC.heads;
      weights[i] = query < p.seq ? p.weights[query * p.weights_stride + column % kC.heads] : 0.f;
      if (is_doubled<Element>(i)) weights[i] *= 0.5f;
    }
    [[maybe_unused]] float* const g_lane = p.logits + (pass_query + odd) * p.logits_stride + lane_key;
    [[maybe_unused]] float bars[kPassQueries / 2];  // of the queries whose sums the lane ends up with
    if constexpr (kC.above) {
#pragma unroll
      for (int i = 0; i < kPassQueries / 2; ++i) {
        const int query = pass_query + 2 * i + odd;
        bars[i] = query < p.seq ? p.above.bars[query] : INFINITY;
      }
    }
    int2* warp_bounds = shared.bounds[thread / 32];
    __syncwarp();
    if (lane < kPassQueries && pass_query + lane < p.seq) warp_bounds[lane] = bounds_of(p, pass_query + lane);
    __syncwarp();
    wait(&shared.q_full, q_parity);
    q_parity ^= 1;

    // If `inside`, all queries see all keys of the part.
    const auto multiply_part = [&](auto inside, int tile, int part) {
      const int first_key = tile * kTileKeys + part * kPartKeys, key = first_key + lane_key;
      float scale;
      if constexpr (kIsFp8<Element>) scale = p.k_scale[inside ? key : min(key, p.seq_kv - 1)];
      warpgroup_fence_operand(r_s);
      warpgroup_arrive();
      tiles::multiply(mma, r_keys(_, part, _, ring.slot), r_q(_, pass, _), r_s(_, 0, 0));
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);

      float key_sums[kPassQueries];
      sum_heads<Element, kC.heads, kPassRows>(r_s, weights, upper, key_sums);
#pragma unroll
      for (int i = 0; i < kPassQueries; i += 2) {
        const float sum =
            (odd ? key_sums[i + 1] : key_sums[i]) + __shfl_xor_sync(~0u, odd ? key_sums[i] : key_sums[i + 1], 1);
        const float logit = kIsFp8<Element> ? sum * scale : sum;
        [[maybe_unused]] float* g_logit = g_lane + i * p.logits_stride + first_key;
        if constexpr (kC.above) {
          bool wanted = logit > bars[i / 2];
          if constexpr (!inside) {
            const int2 bounds = warp_bounds[i + odd];
            wanted = wanted && key >= bounds.x && key < bounds.y;
          }
          finder.add(wanted, key * kPassQueries + i + odd, logit);
        } else if constexpr (inside) {
          *g_logit = logit;
        } else if (pass_query + i + odd < p.seq && key < p.seq_kv) {
          const int2 bounds = warp_bounds[i + odd];
          *g_logit = key >= bounds.x && key < bounds.y ? logit : -INFINITY;
        }
      }
      if constexpr (kC.above && !kC.unrolls()) finder.hand_over_if_full(pass_query);
    };
    const int begin = first_part * kPartKeys, end = end_part * kPartKeys;
    const int inside_begin = max(begin, range.common_begin), inside_end = min(end, range.common_end);
    for (int tile = first_part / kTileParts; tile * kTileParts < end_part; ++tile, ring.advance()) {
      wait(&shared.keys_full[ring.slot], ring.parity);
      if (queries == kQueries && tile * kTileKeys >= inside_begin && (tile + 1) * kTileKeys <= inside_end) {
        constexpr int kParts = kC.warpgroup_parts(), kTurns = kTileParts / kParts;
#pragma unroll(kC.unrolls() ? kParts : 1)
        for (int i = 0; i < kParts; ++i) multiply_part(std::true_type{}, tile, kTurns > 1 ? i * kTurns + turn : i);
      } else {
#pragma unroll 1
        for (int part = turn; part < kTileParts && turn < turns; part += turns) {
          const int first_key = tile * kTileKeys + part * kPartKeys;
          if (first_key >= begin && first_key < end) multiply_part(std::false_type{}, tile, part);
        }
      }
      if (lane == 0) arrive(&shared.keys_empty[ring.slot]);
      if constexpr (kC.above && kC.unrolls()) finder.hand_over_if_full(pass_query);
    }
    if (lane == 0) arrive(&shared.q_empty);
    if constexpr (kC.above) finder.hand_over_rest(pass_query);
  });
  if constexpr (kC.above) finder.finish();
}

template <class Element, int kRowBytes, int kHeads, bool kAbove>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_logits_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map) {
  constexpr Config kC{kRowBytes, kHeads, kAbove};
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kC>*>(shared_bytes_);
  const int blocks = (p.seq + kC.queries() - 1) / kC.queries();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.q_empty, kMathThreads / 32);
    for (int i = 0; i < kC.stages(); ++i) {
      barrier_init(&shared.keys_full[i], 1);
      barrier_init(&shared.keys_empty[i], kMathThreads / 32);
    }
    shared.rest.init(kMathThreads / 32);
    if constexpr (kAbove) {
      for (auto& finds : shared.finds) finds.init();
    }
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_preceding_kernel();
  if constexpr (!kAbove) {
    if (p.any_left != nullptr && *p.any_left == 0) return;
  }
  plan(shared, p, blocks);

  if (threadIdx.x < kMathThreads) {
    grow_registers<kMathRegisters>();
    multiply(shared, p, threadIdx.x);
  } else {
    shrink_registers<kFeederRegisters>();
    const int thread = threadIdx.x - kMathThreads;
    if (thread < 32) {
      feed(shared, p, q_map, k_map, blocks);
    } else if constexpr (kAbove) {
      collect<kC.pass_queries()>(shared.finds, p.above, thread - 32);
    } else if (p.clean) {
      clean<kC>(p, blocks, thread - 32, kSpareThreads);
    }
  }
}

}  // namespace dsa::indexer_logits
