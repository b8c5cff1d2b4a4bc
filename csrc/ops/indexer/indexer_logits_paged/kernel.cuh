// Lightning indexer over a paged cache: logits[b N + n, t] = scale[t] * sum_h relu(q[b, n, h].k[t]) * weights[b N + n,
// h].
//
// Warp specialization. Who does what:
//
//   role      warps            does                                            waits on     signals
//   multiply  warpgroups 0-2   scores of a tile, 64 keys of one page, with     tile_full,   tile_empty
//                              all queries of its sequence; logits             q_full
//   feed      warps 12-14      each loads the tiles of a warpgroup, and        tile_empty,  tile_full (by TMA),
//                              their scales                                    q_full       q_empty
//   query     warp 15          loads Q of each sequence, its weights and       q_empty      q_full (by TMA)
//                              lengths; then writes -inf after the last tile
//                              of each sequence, and bounds of the queries
//
// The tiles of all sequences form one long list, of which each persistent CTA takes an equal run; the table and the
// lengths are read on the device. The ring of tiles is what hides the latency of memory. A tile belongs to one multiply
// warpgroup, and to the warp that feeds it: warpgroup w takes tiles w, w + 3, .. of the CTA's run. Each logit is
// computed as in indexer_logits.
//
// Programmatic dependent launch (PDL): all roles wait for the preceding kernel.
#pragma once

#include <cuda.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "config.h"
#include "ops/indexer/indexer_logits/heads.cuh"
#include "ops/indexer/indexer_logits/runs.cuh"
#include "params.h"
#include "sm90/mbarrier.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_logits_paged {

using namespace dsa::tiles;
using indexer_logits::kIsFp8;

// What the feeding warp says about a tile.
struct alignas(16) Tile {
  int ordinal;     // of the sequence in the CTA's run; -1: the run has ended
  int first_key;   // in the sequence; the tile's columns of the logits begin there
  int keys_end;    // keys before it have been loaded, none if their block does not exist
  int column_end;  // where the columns end
};

// Consecutive keys, those that a query sees.
struct KeyRun {
  int begin, count;  // count: -1 if there is no such query

  __device__ __forceinline__ bool contains(int key) const {
    return static_cast<unsigned>(key - begin) < static_cast<unsigned>(count);
  }
};

template <class Element, Config kC>
struct SharedStorage {
  alignas(1024) Element q[kC.q_slots()][kC.max_passes()][kC.pass_bytes() / sizeof(Element)];
  alignas(1024) Element keys[kC.stages()][kC.tile_bytes() / sizeof(Element)];
  alignas(16) float scales[kIsFp8<Element> ? kC.stages() : 1][kTileKeys];
  // For each 16 rows of Q, four words for each lane of a quad, as sum_heads takes them.
  alignas(16) float weights[kC.q_slots()][kC.max_rows()];
  Tile tiles[kC.stages()];
  KeyRun seen[kC.q_slots()][kMaxQueries];
  int sequences[kC.q_slots()];
  indexer_logits::RunStorage<kThreads> plan;  // items are sequences
  alignas(8) uint64_t q_full[kC.q_slots()], q_empty[kC.q_slots()], tile_full[kC.stages()], tile_empty[kC.stages()];
};

// How many keys a query sees.
__device__ __forceinline__ int length_of(const Params& p, int sequence, int query) {
  const int length = max(0, p.context_lens[sequence * p.lens_stride_b + query * p.lens_stride_n]);
  return min(max(0, p.length_per_query ? length : length - p.queries + 1 + query), p.max_keys);
}

__device__ __forceinline__ KeyRun seen_by(const Params& p, int sequence, int query) {
  const int begin = p.starts == nullptr ? 0 : max(0, p.starts[query * p.starts_stride]);
  return {begin, max(0, length_of(p, sequence, query) - begin)};
}

// The tiles that hold the keys which any query of a sequence sees, and the end of these keys.
struct Extent {
  int keys_end, first_tile, tiles;

  // Work is counted in units: one for the start of a sequence, and one per tile.
  __device__ __forceinline__ int units() const { return tiles > 0 ? 1 + tiles : 0; }
};

// Tiles of one page.
__device__ __forceinline__ int page_tiles(const Params& p) { return (p.page + kTileKeys - 1) / kTileKeys; }

__device__ __forceinline__ Extent extent_of(const Params& p, int sequence) {
  int begin = INT_MAX, end = 0;
#pragma unroll 1
  for (int query = p.length_per_query ? 0 : p.queries - 1; query < p.queries; ++query) {
    const KeyRun seen = seen_by(p, sequence, query);
    if (seen.count > 0) begin = min(begin, seen.begin), end = max(end, seen.begin + seen.count);
  }
  const int first_tile = end > 0 ? begin / kTileKeys : 0;  // with several pages, `begin` is 0
  const int end_tile = end / p.page * page_tiles(p) + (end % p.page + kTileKeys - 1) / kTileKeys;
  return {end, first_tile, end_tile - first_tile};
}

// The block that holds tile `tile` of a sequence, or -1.
__device__ __forceinline__ int block_of(const Params& p, int sequence, int tile) {
  if (p.block_table == nullptr) return 0;
  const int block = p.block_table[sequence * p.table_stride_b + tile / page_tiles(p) * p.table_stride_page];
  return block < p.blocks ? max(block, -1) : -1;
}

// Calls `visit(sequence, ordinal, first, end)` for tiles [first, end) of each sequence in a CTA's run.
template <class Visit>
__device__ __forceinline__ void walk(const indexer_logits::Run& run, const Params& p, Visit visit) {
  int skip = run.skip, ordinal = 0;
  int64_t left = run.units;
  for (int sequence = run.item; left > 0 && sequence < p.batch; ++sequence, skip = 0) {
    const Extent extent = extent_of(p, sequence);
    const int end = static_cast<int>(min(int64_t{extent.units()}, skip + left));
    left -= end - skip;
    const int first = max(skip - 1, 0);
    if (first < end - 1) visit(sequence, ordinal++, extent.first_tile + first, extent.first_tile + end - 1);
  }
}

// Passes over the rows of Q of a sequence.
template <Config kC>
__device__ __forceinline__ int passes_of(const Params& p) {
  return kC.max_passes() == 1 ? 1 : (p.queries * kC.heads + kC.pass_rows - 1) / kC.pass_rows;
}

// Loads Q of each sequence, its weights and what its queries see. Run by one warp.
template <class Element, Config kC>
__device__ __forceinline__ void load_queries(SharedStorage<Element, kC>& shared, const Params& p,
                                             const CUtensorMap& q_map) {
  constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element), kSlots = kC.q_slots();
  const int lane = threadIdx.x % 32, passes = passes_of<kC>(p);
  walk(shared.plan.run, p, [&](int sequence, int ordinal, int, int) {
    const int slot = ordinal % kSlots;
    if (ordinal >= kSlots) wait(&shared.q_empty[slot], (ordinal / kSlots - 1) & 1);
    if (lane == 0) {
      expect_bytes(&shared.q_full[slot], passes * kC.pass_bytes());
      for (int i = 0; i < passes * kC.chunks(); ++i) {
        const int pass = i / kC.chunks(), column = i % kC.chunks() * kChunkColumns;
        tma_load(shared.q[slot][pass] + kC.pass_rows * column, &q_map,
                 {column, 0, 0, pass * kC.pass_queries(), sequence}, &shared.q_full[slot]);
      }
    }
    if (lane < p.queries) shared.seen[slot][lane] = seen_by(p, sequence, lane);
    if (lane == 0) shared.sequences[slot] = sequence;
#pragma unroll 4
    for (int row = lane; row < passes * kC.pass_rows; row += 32) {
      const int query = row / kC.heads, value = row / 8 * 2 + row % 2;
      float weight = 0;
      if (query < p.queries) {
        weight = p.weights[(int64_t{sequence} * p.queries + query) * p.weights_stride + row % kC.heads];
      }
      shared.weights[slot][row / 16 * 16 + row % 8 / 2 * 4 + value % 4] =
          indexer_logits::is_doubled<Element>(value) ? 0.5f * weight : weight;
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.q_full[slot]);
  });
}

// Loads the tiles of one warpgroup. Used by one warp.
template <class Element, Config kC>
struct Feeder {
  static constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element), kQSlots = kC.q_slots();
  static constexpr int kStages = kC.stages(), kOwnStages = kStages / kMathWarpgroups;
  SharedStorage<Element, kC>& shared;
  const Params& p;
  const CUtensorMap& k_map;
  int warpgroup;
  Ring<kStages> ring;
  int issued = 0;  // of the warpgroup's tiles

  // Says that the warpgroup no longer uses the slot of Q of a sequence, when it has released its first `count` tiles.
  // It releases them in order, and what had a stage's former content has been waited for when the stage was filled
  // again. The wait for the slot's present Q keeps this warp from being a phase ahead of the others.
  __device__ __forceinline__ void release_queries(int ordinal, int count) {
    const int slot = ordinal % kQSlots, last = count - 1;
    wait(&shared.q_full[slot], (ordinal / kQSlots - 1) & 1);
    if (last >= max(0, issued - kOwnStages)) {
      wait(&shared.tile_empty[warpgroup + last % kOwnStages * kMathWarpgroups], last / kOwnStages & 1);
    }
    arrive(&shared.q_empty[slot]);
  }

  // Called by one lane.
  __device__ __forceinline__ void load_tile(int ordinal, int tile, int block) {
    const int tiles = page_tiles(p), page = tiles == 1 ? tile : tile / tiles, first = (tile - page * tiles) * kTileKeys;
    const int keys = min(kTileKeys, p.page - first), first_key = page * p.page + first, slot = ring.slot;
    wait(&shared.tile_empty[slot], ring.parity ^ 1);
    shared.tiles[slot] = {ordinal, first_key, block >= 0 ? first_key + keys : 0, min(first_key + keys, p.columns)};
    if (block < 0) {
      arrive(&shared.tile_full[slot]);
      return;
    }
    const float* g_scales = nullptr;
    int scale_bytes = 0;
    if constexpr (kIsFp8<Element>) {
      const auto* g_block = static_cast<const char*>(p.k_cache) + block * p.cache_stride_block;
      const auto* g_behind = reinterpret_cast<const float*>(g_block + p.page * int64_t{kC.row_bytes});
      g_scales = (p.k_scale == nullptr ? g_behind : p.k_scale) + first;
      // Bulk copies take multiples of 16 bytes, as all pages of a cache are.
      const int whole = keys / 4 * 4;
      for (int key = whole; key < keys; ++key) shared.scales[slot][key] = g_scales[key];
      scale_bytes = whole * sizeof(float);
    }
    arrive_and_expect(&shared.tile_full[slot], kC.tile_bytes() + scale_bytes);
    for (int c = 0; c < kC.chunks(); ++c) {
      tma_load(shared.keys[slot] + c * kTileKeys * kChunkColumns, &k_map, {c * kChunkColumns, first, 0, block, 0},
               &shared.tile_full[slot]);
    }
    if (scale_bytes > 0) bulk_load(shared.scales[slot], g_scales, scale_bytes, &shared.tile_full[slot]);
  }

  // Every third tile of a sequence, from `first` on. Called by all lanes.
  __device__ __forceinline__ void load_tiles(int sequence, int ordinal, int first, int end) {
    constexpr int kStep = 32 * kMathWarpgroups;
    const int own = first + static_cast<int>(threadIdx.x % 32) * kMathWarpgroups;
    const auto read_table = [&](int tile) { return tile < end ? block_of(p, sequence, tile) : -1; };
    int blocks = read_table(own);
    for (int begin = first; begin < end; begin += kStep) {
      const int next = read_table(own + (begin - first) + kStep);
      int lane = 0;
      for (int tile = begin; tile < min(end, begin + kStep); tile += kMathWarpgroups, ++lane) {
        const int block = __shfl_sync(~0u, blocks, lane);
        if (threadIdx.x % 32 == 0) load_tile(ordinal, tile, block);
        ring.advance(kMathWarpgroups);
        ++issued;
      }
      blocks = next;
    }
  }

  __device__ __forceinline__ void run() {
    const bool leader = threadIdx.x % 32 == 0;
    ring.advance(warpgroup);
    int turn = warpgroup;  // whose is the first tile of the sequence: warpgroup `turn` tiles before this one's
    int previous_begin = 0;
    walk(shared.plan.run, p, [&](int sequence, int ordinal, int first, int end) {
      if (leader && ordinal >= kQSlots) release_queries(ordinal, kQSlots == 1 ? issued : previous_begin);
      previous_begin = issued;
      load_tiles(sequence, ordinal, first + turn, end);
      turn = (turn + kMathWarpgroups - (end - first) % kMathWarpgroups) % kMathWarpgroups;
    });
    if (leader) {
      wait(&shared.tile_empty[ring.slot], ring.parity ^ 1);
      shared.tiles[ring.slot].ordinal = -1;
      arrive(&shared.tile_full[ring.slot]);
    }
  }
};

// Writes -inf to the columns before the first tile of each sequence and after the last one, and the bounds of the
// queries where these are wanted. Run by one warp.
__device__ __forceinline__ void clean(const Params& p) {
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

// Multiplies keys and sums over heads. `thread` is in [0, kMathThreads).
template <class Element, Config kC>
__device__ __forceinline__ void multiply(SharedStorage<Element, kC>& shared, const Params& p, int thread) {
  using namespace cute;
  constexpr int kColumns = kC.row_bytes / sizeof(Element), kPassQueries = kC.pass_queries(), kQSlots = kC.q_slots();
  constexpr int kRows = kC.pass_rows;
  using Atom = std::conditional_t<kC.chunk_bytes() == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kRows>, Int<32 / int(sizeof(Element))>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  const int lane = thread % 32, warp = thread / 32 % 4;
  Mma mma;
  const auto slice = mma.get_slice(thread % 128);
  // Descriptors of all operands.
  const Tensor r_q = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.q[0][0]),
                  tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kColumns>, Int<kQSlots * kC.max_passes()>>{})));
  const Tensor r_keys = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.keys[0]), tile_to_shape(Atom{}, Shape<Int<kTileKeys>, Int<kColumns>, Int<kC.stages()>>{})));
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kRows>>{});

  // Of the sums of a warp's 16 keys, a lane ends up with one key, for every other query; for one query, half of the
  // lanes do.
  const int upper = lane >> 1 & 1, odd = lane & 1;
  const int lane_key = warp * 16 + upper * 8 + lane / 4;
  const int passes = passes_of<kC>(p);
  int ordinal = -2, q_slot = 0;  // no sequence yet
  float* g_lane = nullptr;       // where the first of the lane's queries has the lane's first key
  float weights[kRows / 4];
  KeyRun seen[(kPassQueries + 1) / 2];  // by the lane's queries in a pass
  // What is the same in a whole warp comes from votes and reductions: then the compiler keeps it, and the descriptors
  // of operands, in uniform registers.
  Ring<kC.stages()> ring;
  for (ring.advance(__reduce_max_sync(~0u, thread / 128));; ring.advance(kMathWarpgroups)) {
    wait(&shared.tile_full[ring.slot], ring.parity);
    const Tile tile = shared.tiles[ring.slot];
    const int key = tile.first_key + lane_key;
    float scale = 1;
    if constexpr (kIsFp8<Element>) scale = shared.scales[ring.slot][lane_key];
    const bool is_new = __any_sync(~0u, tile.ordinal != ordinal);
    if (is_new) {
      if (__any_sync(~0u, tile.ordinal < 0)) return;
      ordinal = tile.ordinal;
      q_slot = __reduce_max_sync(~0u, ordinal % kQSlots);
      wait(&shared.q_full[q_slot], ordinal / kQSlots & 1);
      g_lane = p.logits + (int64_t{shared.sequences[q_slot]} * p.queries + odd) * p.logits_stride + lane_key;
    }
    float* g_logit = g_lane + tile.first_key;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      if (is_new || passes > 1) {
#pragma unroll
        for (int i = 0; i < kRows / 4; i += 4) {
          const int row = pass * kRows + i * 4 + lane % 4 * 4;
          const auto four = *reinterpret_cast<const float4*>(shared.weights[q_slot] + row);
          weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < kPassQueries; i += 2) {
          const int query = pass * kPassQueries + i + odd;
          seen[i / 2] = i + odd < kPassQueries && query < p.queries ? shared.seen[q_slot][query] : KeyRun{0, -1};
        }
      }
      warpgroup_fence_operand(r_s);
      warpgroup_arrive();
      tiles::multiply(mma, r_keys(_, 0, _, ring.slot), r_q(_, 0, _, q_slot * kC.max_passes() + pass), r_s(_, 0, 0));
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);

      float key_sums[kPassQueries];
      indexer_logits::sum_heads<Element, kC.heads, kRows>(r_s, weights, upper, key_sums);
#pragma unroll
      for (int i = 0; i < kPassQueries; i += 2, g_logit += 2 * p.logits_stride) {
        const float other = key_sums[min(i + 1, kPassQueries - 1)];
        const float sum = (odd ? other : key_sums[i]) + __shfl_xor_sync(~0u, odd ? key_sums[i] : other, 1);
        const float logit = kIsFp8<Element> ? sum * scale : sum;
        if (key < tile.column_end && seen[i / 2].count >= 0) {
          *g_logit = key < tile.keys_end && seen[i / 2].contains(key) ? logit : -INFINITY;
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[ring.slot]);
  }
}

template <class Element, int kRowBytes, int kHeads, int kPassRows>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_logits_paged_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                                const __grid_constant__ CUtensorMap k_map) {
  constexpr Config kC{kRowBytes, kHeads, kPassRows};
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kC>*>(shared_bytes_);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    for (int i = 0; i < kC.q_slots(); ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], kMathWarpgroups);
    }
    for (int i = 0; i < kC.stages(); ++i) {
      barrier_init(&shared.tile_full[i], 1);
      barrier_init(&shared.tile_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_preceding_kernel();
  indexer_logits::find_run<false>(shared.plan, p.batch, [&](int sequence) { return extent_of(p, sequence).units(); });

  if (threadIdx.x < kMathThreads) {
    multiply(shared, p, threadIdx.x);
    return;
  }
  const int warp = (threadIdx.x - kMathThreads) / 32;
  if (warp < kMathWarpgroups) {
    Feeder<Element, kC>{shared, p, k_map, warp}.run();
  } else {
    load_queries(shared, p, q_map);
    clean(p);
  }
}

}  // namespace dsa::indexer_logits_paged
