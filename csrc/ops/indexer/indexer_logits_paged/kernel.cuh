// Lightning indexer over a paged cache: logits[b N + n, t] = scale[t] * sum_h relu(q[b, n, h].k[t]) * weights[b N + n,
// h].
//
// Warp specialization. Who does what:
//
//   role      warps            registers  does                                       waits on    signals
//   multiply  warpgroups 0-3   112        scores of a tile, 64 keys of one page,     tile_full,  tile_empty
//                                         with all queries of its sequence; logits   q_full
//   feed      warp 16          32         loads Q of each sequence, its tiles and    tile_empty  q_full, tile_full
//                                         their scales                                           (by TMA)
//   clean     warps 17-19      32         writes -inf after the last tile of each
//                                         sequence; bounds of the queries
//
// The tiles of all sequences form one long list, of which each persistent CTA takes an equal run; the table and the
// lengths are read on the device. The ring of tiles is what hides the latency of memory. A tile belongs to one multiply
// warpgroup: warpgroup w takes tiles w, w + 4, .. of the CTA's run. Each logit is computed as in indexer_logits.
#pragma once

#include <cuda.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "config.h"
#include "ops/indexer/indexer_logits/heads.cuh"
#include "ops/indexer/indexer_logits/runs.cuh"
#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_logits_paged {

using namespace dsa::tiles;
using indexer_logits::kIsFp8;

// What the feeding warp says about a tile.
struct alignas(16) Tile {
  int sequence;   // -1: the end of the CTA's run
  int ordinal;    // of the sequence in the CTA's run
  int first_key;  // in the sequence
  int keys;       // at most kTileKeys; negative if their block does not exist, so that nothing has been loaded
};

template <class Element, Config kC>
struct SharedStorage {
  static constexpr int kElements = kC.matrix_bytes() / sizeof(Element);
  alignas(1024) Element q[kC.q_slots()][kC.max_passes()][kElements];
  alignas(1024) Element keys[kC.stages()][kElements];
  alignas(16) float scales[kIsFp8<Element> ? kC.stages() : 1][kTileKeys];
  Tile tiles[kC.stages()];
  int lengths[kC.q_slots()][kMaxQueries];
  indexer_logits::RunStorage<kThreads> plan;  // items are sequences
  alignas(8) uint64_t q_full[kC.q_slots()], tile_full[kC.stages()], tile_empty[kC.stages()];
};

// How many keys a query sees.
__device__ __forceinline__ int length_of(const Params& p, int sequence, int query) {
  const int length = max(0, p.context_lens[sequence * p.lens_stride_b + query * p.lens_stride_n]);
  return min(max(0, p.length_per_query ? length : length - p.queries + 1 + query), p.max_keys);
}

// How many keys the queries of a sequence see, and the tiles of these.
struct Extent {
  int keys, tiles;

  // Work is counted in units: one for the start of a sequence, and one per tile.
  __device__ __forceinline__ int units() const { return tiles > 0 ? 1 + tiles : 0; }
};

// Tiles of one page.
__device__ __forceinline__ int page_tiles(const Params& p) { return (p.page + kTileKeys - 1) / kTileKeys; }

__device__ __forceinline__ Extent extent_of(const Params& p, int sequence) {
  int keys = length_of(p, sequence, p.queries - 1);
  for (int query = 0; p.length_per_query && query < p.queries - 1; ++query) {
    keys = max(keys, length_of(p, sequence, query));
  }
  return {keys, keys / p.page * page_tiles(p) + (keys % p.page + kTileKeys - 1) / kTileKeys};
}

// The block that holds tile `tile` of a sequence, or -1.
__device__ __forceinline__ int block_of(const Params& p, int sequence, int tile) {
  const int block = p.block_table[sequence * p.table_stride_b + tile / page_tiles(p) * p.table_stride_page];
  return block < p.blocks ? max(block, -1) : -1;
}

// Loads tiles in the order of the run. Used by one warp.
template <class Element, Config kC>
struct Feeder {
  static constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element), kQSlots = kC.q_slots();
  static constexpr int kStages = kC.stages();
  SharedStorage<Element, kC>& shared;
  const Params& p;
  const CUtensorMap &q_map, &k_map;
  Ring<kStages> ring;
  int issued = 0;  // tiles

  // Waits until the warpgroups have released the run's first `count` tiles. Each releases its own in order, so its last
  // one is enough; and what had a stage's former content has been waited for when the stage was filled again.
  __device__ __forceinline__ void wait_until_released(int count) {
    for (int i = max(0, max(count - kMathWarpgroups, issued - kStages)); i < count; ++i) {
      wait(&shared.tile_empty[i % kStages], i / kStages & 1);
    }
  }

  // Q of a sequence and the lengths of its queries. Called by all lanes; `released` tiles used the slot or were before
  // those that did.
  __device__ __forceinline__ void load_queries(int sequence, int slot, int released) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) wait_until_released(released);
    __syncwarp();
    if (lane < p.queries) shared.lengths[slot][lane] = length_of(p, sequence, lane);
    __syncwarp();
    if (lane != 0) return;
    const int passes = (p.queries * kC.heads + kPassRows - 1) / kPassRows;
    arrive_and_expect(&shared.q_full[slot], passes * kC.matrix_bytes());
    for (int i = 0; i < passes * kC.chunks(); ++i) {
      const int pass = i / kC.chunks(), column = i % kC.chunks() * kChunkColumns;
      tma_load(shared.q[slot][pass] + kPassRows * column, &q_map, {column, 0, 0, pass * kC.pass_queries(), sequence},
               &shared.q_full[slot]);
    }
  }

  // Called by one lane.
  __device__ __forceinline__ void load_tile(int sequence, int ordinal, int tile, int block) {
    const int tiles = page_tiles(p), page = tiles == 1 ? tile : tile / tiles, first = (tile - page * tiles) * kTileKeys;
    const int keys = min(kTileKeys, p.page - first), slot = ring.slot;
    wait(&shared.tile_empty[slot], ring.parity ^ 1);
    shared.tiles[slot] = {sequence, ordinal, page * p.page + first, block >= 0 ? keys : -keys};
    if (block < 0) {
      arrive(&shared.tile_full[slot]);
      return;
    }
    constexpr bool kFp8 = kIsFp8<Element>;
    arrive_and_expect(&shared.tile_full[slot], kC.matrix_bytes() + (kFp8 ? keys * int{sizeof(float)} : 0));
    for (int c = 0; c < kC.chunks(); ++c) {
      tma_load(shared.keys[slot] + c * kTileKeys * kChunkColumns, &k_map, {c * kChunkColumns, first, 0, block, 0},
               &shared.tile_full[slot]);
    }
    if constexpr (kFp8) {
      const auto* g_block = static_cast<const char*>(p.k_cache) + block * p.cache_stride_block;
      bulk_load(shared.scales[slot], g_block + p.page * int64_t{kC.row_bytes} + first * sizeof(float),
                keys * sizeof(float), &shared.tile_full[slot]);
    }
  }

  // Tiles [first, end) of a sequence. Called by all lanes.
  __device__ __forceinline__ void load_tiles(int sequence, int ordinal, int first, int end) {
    const int lane = threadIdx.x % 32;
    const auto read_table = [&](int tile) { return tile < end ? block_of(p, sequence, tile) : -1; };
    int blocks = read_table(first + lane);
    for (int begin = first; begin < end; begin += 32) {
      const int next = read_table(begin + 32 + lane);
      for (int i = 0; i < min(32, end - begin); ++i, ring.advance(), ++issued) {
        const int block = __shfl_sync(~0u, blocks, i);
        if (lane == 0) load_tile(sequence, ordinal, begin + i, block);
      }
      blocks = next;
    }
  }

  __device__ __forceinline__ void run() {
    int skip = shared.plan.run.skip, ordinal = 0, previous_begin = 0;
    int64_t left = shared.plan.run.units;
    for (int sequence = shared.plan.run.item; left > 0 && sequence < p.batch; ++sequence, skip = 0) {
      const int units = extent_of(p, sequence).units(), end = static_cast<int>(min(int64_t{units}, skip + left));
      left -= end - skip;
      const int first = max(skip - 1, 0);
      if (first >= end - 1) continue;
      load_queries(sequence, ordinal % kQSlots, kQSlots == 1 ? issued : previous_begin);
      previous_begin = issued;
      load_tiles(sequence, ordinal++, first, end - 1);
    }
    for (int i = 0; i < kMathWarpgroups && threadIdx.x % 32 == 0; ++i, ring.advance()) {
      wait(&shared.tile_empty[ring.slot], ring.parity ^ 1);
      shared.tiles[ring.slot].sequence = -1;
      arrive(&shared.tile_full[ring.slot]);
    }
  }
};

// Writes -inf to the columns after the last tile of each sequence, and the bounds of the queries where these are
// wanted. Run by `threads` threads in whole warps; `thread` is this one's index.
__device__ __forceinline__ void clean(const Params& p, int thread, int threads) {
  const int64_t rows = int64_t{p.batch} * p.queries, first = int64_t{blockIdx.x} * threads + thread;
  for (int64_t row = first; p.bounds != nullptr && row < rows; row += gridDim.x * threads) {
    p.bounds[row] = 0;
    p.bounds[rows + row] = length_of(p, static_cast<int>(row / p.queries), static_cast<int>(row % p.queries));
  }
  const int parts = (p.columns + kCleanColumns - 1) / kCleanColumns;
  for (int64_t i = blockIdx.x; p.clean && i < int64_t{p.batch} * parts; i += gridDim.x) {
    const int sequence = static_cast<int>(i / parts), part = static_cast<int>(i % parts) * kCleanColumns;
    const int keys = extent_of(p, sequence).keys, in_page = keys % p.page;
    const int covered = keys - in_page + min(p.page, (in_page + kTileKeys - 1) / kTileKeys * kTileKeys);
    const int begin = max(part, covered), end = min(p.columns, part + kCleanColumns);
    for (int query = 0; query < p.queries; ++query) {
      float* g_row = p.logits + (int64_t{sequence} * p.queries + query) * p.logits_stride;
      for (int column = begin + thread; column < end; column += threads) g_row[column] = -INFINITY;
    }
  }
}

// A lane's weights for a pass, as sum_heads takes them.
template <class Element, int kHeads>
__device__ __forceinline__ void load_weights(const Params& p, int sequence, int pass, float (&weights)[kPassRows / 4]) {
#pragma unroll
  for (int i = 0; i < kPassRows / 4; i += 2) {
    const int column = column_in_row(i, threadIdx.x % 32), query = pass * (kPassRows / kHeads) + column / kHeads;
    float2 pair{};
    if (query < p.queries) {
      const int64_t row = int64_t{sequence} * p.queries + query;
      pair = *reinterpret_cast<const float2*>(p.weights + row * p.weights_stride + column % kHeads);
    }
    weights[i] = indexer_logits::is_doubled<Element>(i) ? 0.5f * pair.x : pair.x;
    weights[i + 1] = indexer_logits::is_doubled<Element>(i + 1) ? 0.5f * pair.y : pair.y;
  }
}

// Multiplies keys and sums over heads. `thread` is in [0, kMathThreads).
template <class Element, Config kC>
__device__ __forceinline__ void multiply(SharedStorage<Element, kC>& shared, const Params& p, int thread) {
  using namespace cute;
  constexpr int kColumns = kC.row_bytes / sizeof(Element), kPassQueries = kC.pass_queries(), kQSlots = kC.q_slots();
  using Atom = std::conditional_t<kC.chunk_bytes() == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kPassRows>, Int<32 / int(sizeof(Element))>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  const int lane = thread % 32, warp = thread / 32 % 4;
  Mma mma;
  const auto slice = mma.get_slice(thread % 128);
  // Descriptors of all operands.
  const Tensor r_q = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.q[0][0]),
                  tile_to_shape(Atom{}, Shape<Int<kPassRows>, Int<kColumns>, Int<kC.q_matrices()>>{})));
  const Tensor r_keys = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.keys[0]), tile_to_shape(Atom{}, Shape<Int<kTileKeys>, Int<kColumns>, Int<kC.stages()>>{})));
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kPassRows>>{});

  // Of the sums of a warp's 16 keys, a lane ends up with one key, for every other query; for one query, half of the
  // lanes do.
  const int upper = lane >> 1 & 1, odd = lane & 1;
  const int lane_key = warp * 16 + upper * 8 + lane / 4;
  const int passes = (p.queries * kC.heads + kPassRows - 1) / kPassRows;
  int ordinal = -1;
  float weights[kPassRows / 4];
  Ring<kC.stages()> ring;
  for (ring.advance(cutlass::canonical_warp_group_idx());; ring.advance(kMathWarpgroups)) {
    wait(&shared.tile_full[ring.slot], ring.parity);
    const Tile tile = shared.tiles[ring.slot];
    if (tile.sequence < 0) return;
    const int q_slot = tile.ordinal % kQSlots, key = tile.first_key + lane_key;
    const bool is_new = tile.ordinal != ordinal, is_key = lane_key < tile.keys;
    const bool is_stored = lane_key < abs(tile.keys) && key < p.columns;
    float scale = 1;
    if constexpr (kIsFp8<Element>) scale = shared.scales[ring.slot][lane_key];
    if (is_new) wait(&shared.q_full[q_slot], tile.ordinal / kQSlots & 1);
    ordinal = tile.ordinal;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      if (is_new || passes > 1) load_weights<Element, kC.heads>(p, tile.sequence, pass, weights);
      warpgroup_fence_operand(r_s);
      warpgroup_arrive();
      tiles::multiply(mma, r_keys(_, 0, _, ring.slot), r_q(_, 0, _, q_slot * kC.max_passes() + pass), r_s(_, 0, 0));
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);

      float key_sums[kPassQueries];
      indexer_logits::sum_heads<Element, kC.heads, kPassRows>(r_s, weights, upper, key_sums);
      const int first_query = pass * kPassQueries;
      const int64_t row = int64_t{tile.sequence} * p.queries + first_query + odd;
      float* g_logit = p.logits + row * p.logits_stride + key;
#pragma unroll
      for (int i = 0; i < kPassQueries; i += 2, g_logit += 2 * p.logits_stride) {
        const float other = key_sums[min(i + 1, kPassQueries - 1)];
        const float sum = (odd ? other : key_sums[i]) + __shfl_xor_sync(~0u, odd ? key_sums[i] : other, 1);
        const float logit = kIsFp8<Element> ? sum * scale : sum;
        const int query = first_query + i + odd;
        if (i + odd < kPassQueries && query < p.queries && is_stored) {
          *g_logit = is_key && key < shared.lengths[q_slot][query] ? logit : -INFINITY;
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[ring.slot]);
  }
}

template <class Element, int kRowBytes, int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_logits_paged_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                                const __grid_constant__ CUtensorMap k_map) {
  constexpr Config kC{kRowBytes, kHeads};
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kC>*>(shared_bytes_);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    for (int i = 0; i < kC.q_slots(); ++i) barrier_init(&shared.q_full[i], 1);
    for (int i = 0; i < kC.stages(); ++i) {
      barrier_init(&shared.tile_full[i], 1);
      barrier_init(&shared.tile_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  indexer_logits::find_run(shared.plan, p.batch, [&](int sequence) { return extent_of(p, sequence).units(); });

  if (threadIdx.x < kMathThreads) {
    multiply(shared, p, threadIdx.x);
  } else {
    const int thread = threadIdx.x - kMathThreads;
    if (thread < 32) {
      Feeder<Element, kC>{shared, p, q_map, k_map}.run();
    } else {
      clean(p, thread - 32, 96);
    }
  }
}

}  // namespace dsa::indexer_logits_paged
