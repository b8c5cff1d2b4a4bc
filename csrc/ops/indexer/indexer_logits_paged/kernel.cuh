// Lightning indexer over a paged cache: logits[b N + n, t] = scale[t] * sum_h relu(q[b, n, h].k[t]) * weights[b N + n,
// h].
//
// Warp specialization. Who does what:
//
//   role      warps            does                                             waits on     signals
//   multiply  warpgroups 0-3   scores of a tile, 64 keys of one page, with      q_full,      tile_empty,
//                              all queries of its sequence; logits              tile_full    q_empty
//   feed      warps 16-18      load tiles and their scales, in turn             tile_empty   tile_full (by TMA)
//   query     warp 19          loads Q of each sequence, its weights and        q_empty      q_full (by TMA)
//                              lengths, and says which of its tiles the CTA
//                              takes; then writes -inf outside of the tiles
//                              of each sequence, and bounds of the queries
//
// Multiply warps have 104 registers, the others 64. With products of 64 rows, or where few stages fit, there are three
// multiply warpgroups, the other warps are 12-15, and registers stay where they are.
//
// The tiles of all sequences form one long list, of which each persistent CTA takes an equal run; the table and the
// lengths are read on the device. The ring of tiles is what hides the latency of memory. Of the tiles of a CTA's
// run, each multiply warpgroup takes every fourth (or third), and each feeding warp every third. Each logit is computed
// as in indexer_logits.
//
// Programmatic dependent launch (PDL): all roles wait for the preceding kernel.
#pragma once

#include <cuda.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "feed.cuh"
#include "ops/indexer/indexer_logits/heads.cuh"
#include "sequences.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/predicated.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_logits_paged {

using namespace dsa::tiles;

// Passes over the rows of Q of a sequence.
template <Config kC>
__device__ __forceinline__ int passes_of(const KernelParams& p) {
  return kC.max_passes == 1 ? 1 : (p.queries * kC.heads + kC.pass_rows - 1) / kC.pass_rows;
}

// Loads Q of each sequence, its weights and what its queries see. Run by one warp.
template <class Element, Config kC>
__device__ __forceinline__ void load_queries(SharedStorage<Element, kC>& shared, const KernelParams& p,
                                             const CUtensorMap& q_map, const Run& run) {
  constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element);
  const int lane = threadIdx.x % 32, passes = passes_of<kC>(p);
  Ring<kC.q_slots()> ring;
  walk(run, p, [&](const Sequence& sequence) {
    const int slot = ring.slot;
    wait(&shared.q_empty[slot], ring.parity ^ 1);
    if (lane == 0) {
      shared.sequences[slot] = sequence;
      expect_bytes(&shared.q_full[slot], passes * kC.pass_bytes());
#pragma unroll 1
      for (int i = 0; i < passes * kC.chunks(); ++i) {
        const int pass = i / kC.chunks(), column = i % kC.chunks() * kChunkColumns;
        tma_load(shared.q[slot][pass] + kC.pass_rows * column, &q_map,
                 {column, 0, 0, pass * kC.pass_queries(), sequence.index}, &shared.q_full[slot]);
      }
    }
    if (lane < kC.max_queries()) {
      shared.seen[slot][lane] = lane < p.queries ? seen_by(p, sequence.index, lane) : KeyRun{0, -1};
    }
#pragma unroll 4
    for (int row = lane; row < passes * kC.pass_rows; row += 32) {
      const int query = row / kC.heads, value = row / 8 * 2 + row % 2;
      float weight = 0;
      if (query < p.queries) {
        weight = p.weights[(int64_t{sequence.index} * p.queries + query) * p.weights_stride + row % kC.heads];
      }
      shared.weights[slot][row / 16 * 16 + row % 8 / 2 * 4 + value % 4] =
          indexer_logits::is_doubled<Element>(value) ? 0.5f * weight : weight;
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.q_full[slot]);
    ring.advance();
  });
  wait(&shared.q_empty[ring.slot], ring.parity ^ 1);
  if (lane == 0) {
    shared.sequences[ring.slot] = {0, 0, -1};
    arrive(&shared.q_full[ring.slot]);
  }
}

// Writes -inf to the columns before the first tile of each sequence and after the last one, and the bounds of the
// queries where these are wanted. Run by one warp.
__device__ __forceinline__ void clean(const KernelParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = int64_t{p.batch} * p.queries, first = int64_t{blockIdx.x} * 32 + lane;
  for (int64_t row = first; p.bounds != nullptr && row < rows; row += gridDim.x * 32) {
    p.bounds[row] = 0;
    p.bounds[rows + row] = length_of(p, static_cast<int>(row / p.queries), static_cast<int>(row % p.queries));
  }
  const int parts = (p.columns + kCleanColumns - 1) / kCleanColumns;
  for (int64_t i = blockIdx.x; p.clean && i < int64_t{p.batch} * parts; i += gridDim.x) {
    const int sequence = static_cast<int>(i / parts), part = static_cast<int>(i % parts) * kCleanColumns;
    const Extent extent = extent_of(p, sequence);
    const int in_page = extent.keys_end % p.page;
    const int covered = extent.keys_end - in_page + min(p.page, (in_page + kTileKeys - 1) / kTileKeys * kTileKeys);
    const int part_end = min(p.columns, part + kCleanColumns);
#pragma unroll 1
    for (bool after : {false, true}) {
      const int begin = after ? max(part, covered) : part;
      const int end = after ? part_end : min(part_end, extent.first_tile * kTileKeys);
      const int whole = min(end, (begin + 3) / 4 * 4), whole_end = max(whole, end / 4 * 4);  // rows are 16-byte aligned
      for (int query = 0; query < p.queries && begin < end; ++query) {
        float* g_row = p.logits + (int64_t{sequence} * p.queries + query) * p.logits_stride;
        for (int column = whole + 4 * lane; column < whole_end; column += 4 * 32) {
          *reinterpret_cast<float4*>(g_row + column) = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        }
        if (begin + lane < whole) g_row[begin + lane] = -INFINITY;
        if (whole_end + lane < end) g_row[whole_end + lane] = -INFINITY;
      }
    }
  }
}

// Multiplies keys and sums over heads. `thread` is in [0, kC.math_threads()).
template <class Element, Config kC>
__device__ __forceinline__ void multiply(SharedStorage<Element, kC>& shared, const KernelParams& p, int thread) {
  using namespace cute;
  constexpr int kColumns = kC.row_bytes / sizeof(Element), kPassQueries = kC.pass_queries(), kQSlots = kC.q_slots();
  constexpr int kRows = kC.pass_rows, kWarpgroups = kC.math_warpgroups();
  using Atom = std::conditional_t<kC.chunk_bytes() == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kRows>, Int<32 / int(sizeof(Element))>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  // Quotients of unsigned numbers take fewer instructions.
  const int lane = unsigned(thread) % 32, warp = unsigned(thread) / 32 % 4;
  Mma mma;
  const auto slice = mma.get_slice(thread % 128);
  // Descriptors of all operands.
  const Tensor r_q = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.q[0][0]),
                  tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kColumns>, Int<kQSlots * kC.max_passes>>{})));
  const Tensor r_keys = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.keys[0]), tile_to_shape(Atom{}, Shape<Int<kTileKeys>, Int<kColumns>, Int<kC.stages()>>{})));
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kRows>>{});

  // Of the sums of a warp's 16 keys, a lane ends up with one key, for every other query; for one query, half of the
  // lanes do.
  const int upper = lane >> 1 & 1, odd = lane & 1;
  const int lane_key = warp * 16 + upper * 8 + lane / 4;
  const int passes = passes_of<kC>(p);
  const int warpgroup = __reduce_max_sync(~0u, thread / 128);
  Ring<kC.stages()> ring;
  ring.advance(warpgroup);
  int turn = warpgroup;  // tiles of the sequence before the warpgroup's first
  for (Ring<kC.q_slots()> q_ring;; q_ring.advance()) {
    const int q_slot = q_ring.slot;
    wait(&shared.q_full[q_slot], q_ring.parity);
    const Sequence sequence = shared.sequences[q_slot];
    // What is the same in a whole warp comes from reductions: then the compiler keeps it, and the descriptors of
    // operands, in uniform registers.
    const int index = __reduce_max_sync(~0u, sequence.index), begin = __reduce_max_sync(~0u, sequence.first_tile);
    const int end = __reduce_max_sync(~0u, sequence.end_tile);
    if (end < 0) return;
    float weights[kRows / 4];
    const auto load_weights = [&](int pass) {
#pragma unroll
      for (int i = 0; i < kRows / 4; i += 4) {
        const int row = pass * kRows + i * 4 + lane % 4 * 4;
        const auto four = *reinterpret_cast<const float4*>(shared.weights[q_slot] + row);
        weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
      }
    };
    // Where the first of the lane's queries has the lane's first key.
    float* const g_lane = p.logits + (int64_t{index} * p.queries + odd) * p.logits_stride + lane_key;
    if (passes == 1 && begin + turn < end) load_weights(0);
    for (int i = begin + turn; i < end; i += kWarpgroups, ring.advance(kWarpgroups)) {
      wait(&shared.tile_full[ring.slot], ring.parity);
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        if (passes > 1) load_weights(pass);
        warpgroup_fence_operand(r_s);
        warpgroup_arrive();
        tiles::multiply(mma, r_keys(_, 0, _, ring.slot), r_q(_, 0, _, q_slot * kC.max_passes + pass), r_s(_, 0, 0));
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_s);

        float key_sums[kPassQueries];
        indexer_logits::sum_heads<Element, kC.heads, kRows>(r_s, weights, upper, key_sums);
        const Tile tile = shared.tiles[ring.slot];
        float scale = 1;
        if constexpr (kIsFp8<Element>) scale = shared.scales[ring.slot][lane_key];
        const int key = tile.first_key + lane_key;
        float* g_logit = g_lane + tile.first_key + pass * kPassQueries * p.logits_stride;
#pragma unroll
        for (int i = 0; i < kPassQueries; i += 2, g_logit += 2 * p.logits_stride) {
          const float other = key_sums[min(i + 1, kPassQueries - 1)];
          const float sum = (odd ? other : key_sums[i]) + __shfl_xor_sync(~0u, odd ? key_sums[i] : other, 1);
          const float logit = kIsFp8<Element> ? sum * scale : sum;
          const KeyRun seen = shared.seen[q_slot][pass * kPassQueries + i + odd];
          const bool is_seen = key < tile.keys_end && seen.contains(key);
          store_if(key < tile.column_end && seen.count >= 0, g_logit, is_seen ? logit : -INFINITY);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(&shared.tile_empty[ring.slot]);
    }
    turn = (turn + kWarpgroups - (end - begin) % kWarpgroups) % kWarpgroups;
    __syncwarp();
    if (lane == 0) arrive(&shared.q_empty[q_slot]);
  }
}

template <class Element, int kRowBytes, int kHeads, int kPassRows, int kMaxPasses>
__global__ void __launch_bounds__(Config{kRowBytes, kHeads, kPassRows, kMaxPasses}.threads(), 1)
    indexer_logits_paged_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ CUtensorMap q_map,
                                const __grid_constant__ CUtensorMap k_map) {
  constexpr Config kC{kRowBytes, kHeads, kPassRows, kMaxPasses};
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kC>*>(shared_bytes_);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    for (int i = 0; i < kC.q_slots(); ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], kC.math_threads() / 32);
    }
    for (int i = 0; i < kC.stages(); ++i) {
      barrier_init(&shared.tile_full[i], 1);
      barrier_init(&shared.tile_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_preceding_kernel();

  // The compiler knows that this number is the same in a warp, and keeps descriptors in uniform registers.
  if (cutlass::canonical_warp_group_idx() < kC.math_warpgroups()) {
    if constexpr (kC.moves_registers()) grow_registers<kMathRegisters>();
    multiply(shared, p, threadIdx.x);
    return;
  }
  if constexpr (kC.moves_registers()) shrink_registers<kSpareRegisters>();
  const int thread = threadIdx.x - kC.math_threads(), warp = thread / 32;
  const Run run = find_run(shared.plan, p, thread);
  if (warp < kFeeders) {
    feed(shared, p, k_map, run, warp);
  } else {
    load_queries(shared, p, q_map, run);
    clean(p);
  }
}

}  // namespace dsa::indexer_logits_paged
