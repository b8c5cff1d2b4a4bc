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
//                              lengths; writes -inf after the last tile of
//                              each sequence, and bounds of the queries
//
// The tiles of all sequences form one long list, of which each persistent CTA takes an equal run; the table and the
// lengths are read on the device. In long calls the runs leave the end of the list, from which CTAs take pieces when
// their run ends: not all SMs read equally fast. The query warp takes a piece ahead of the feeding warps, which wait
// for it (piece_full, piece_empty). The ring of tiles is what hides the latency of memory. A tile belongs to one
// multiply warpgroup, and to the warp that feeds it: warpgroup w takes tiles w, w + 3, .. of the CTA's run. Each logit
// is computed as in indexer_logits.
#pragma once

#include <cuda.h>

#include "multiply.cuh"
#include "sm90/tma.cuh"

namespace dsa::indexer_logits_paged {

// Loads Q of each sequence of a run, its weights and the lengths of its queries. Called by one warp.
template <class Element, Config kC>
__device__ __forceinline__ void load_queries(SharedStorage<Element, kC>& shared, const Params& p,
                                             const CUtensorMap& q_map, const indexer_logits::Run& run, int& ordinal) {
  constexpr int kChunkColumns = kC.chunk_bytes() / sizeof(Element), kSlots = kC.q_slots();
  const int lane = threadIdx.x % 32, passes = passes_of<kC>(p);
  walk(run, p, ordinal, [&](int sequence, int ordinal, int, int) {
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
    if (lane < p.queries) shared.lengths[slot][lane] = length_of(p, sequence, lane);
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
    arrive_and_expect(&shared.tile_full[slot], kC.tile_bytes() + (kFp8 ? keys * int{sizeof(float)} : 0));
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
        if (threadIdx.x % 32 == 0) load_tile(sequence, ordinal, tile, block);
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
    int previous_begin = 0, ordinal = 0;
    Ring<kPieceSlots> at;
    for (indexer_logits::Run run = shared.plan.run;;) {
      walk(run, p, ordinal, [&](int sequence, int ordinal, int first, int end) {
        if (leader && ordinal >= kQSlots) release_queries(ordinal, kQSlots == 1 ? issued : previous_begin);
        previous_begin = issued;
        load_tiles(sequence, ordinal, first + turn, end);
        turn = (turn + kMathWarpgroups - (end - first) % kMathWarpgroups) % kMathWarpgroups;
      });
      wait(&shared.piece_full[at.slot], at.parity);
      run = shared.pieces[at.slot];
      if (run.units == 0) break;
      __syncwarp();
      if (leader) arrive(&shared.piece_empty[at.slot]);
      at.advance();
    }
    if (leader) {
      wait(&shared.tile_empty[ring.slot], ring.parity ^ 1);
      shared.tiles[ring.slot].sequence = -1;
      arrive(&shared.tile_full[ring.slot]);
    }
  }
};

// Writes -inf to the columns after the last tile of each sequence, and the bounds of the queries where these are
// wanted. Run by one warp.
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
    const int keys = extent_of(p, sequence).keys, in_page = keys % p.page;
    const int covered = keys - in_page + min(p.page, (in_page + kTileKeys - 1) / kTileKeys * kTileKeys);
    const int begin = max(part, covered), end = min(p.columns, part + kCleanColumns);
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

// Finds pieces of what the equal runs leave. Used by one warp, for one piece after the other.
struct PieceFinder {
  const Params& p;
  int64_t units;
  // Where the last piece was found: among 32 sequences, the units before the first of them.
  int first_sequence = 0;
  int64_t units_before = 0;

  __device__ __forceinline__ indexer_logits::Run find(int piece) {
    const int64_t begin = units_of_runs(p, units) + int64_t{piece} * kPieceUnits;
    const int lane = threadIdx.x % 32;
    for (; begin < units && first_sequence < p.batch; first_sequence += 32) {
      const int sequence = first_sequence + lane;
      const int64_t own = sequence < p.batch ? extent_of(p, sequence).units() : 0;
      int64_t end = own;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int64_t other = __shfl_up_sync(~0u, end, lanes);
        if (lane >= lanes) end += other;
      }
      end += units_before;
      const unsigned after = __ballot_sync(~0u, begin < end);
      if (after != 0) {
        const int holder = __ffs(after) - 1;
        const int skip = __shfl_sync(~0u, static_cast<int>(begin - (end - own)), holder);
        return {min(int64_t{kPieceUnits}, units - begin), first_sequence + holder, skip};
      }
      units_before = __shfl_sync(~0u, end, 31);
    }
    return {0, 0, 0};
  }
};

// Loads the queries of all that the CTA does, and takes its pieces.
template <class Element, Config kC>
__device__ __forceinline__ void run_query_warp(SharedStorage<Element, kC>& shared, const Params& p,
                                               const CUtensorMap& q_map) {
  const bool leader = threadIdx.x % 32 == 0;
  const auto take = [&] { return leader && p.taken != nullptr ? atomicAdd(p.taken, 1) : 0; };
  PieceFinder finder{p, shared.units};
  Ring<kPieceSlots> at;
  indexer_logits::Run run = shared.plan.run;
  int ordinal = 0, taken = take();
  for (bool is_first = true;; is_first = false) {
    // The next piece, and the number of the one after it, before this one's queries: these wait for the feeding warps.
    const indexer_logits::Run next = finder.find(__shfl_sync(~0u, taken, 0));
    wait(&shared.piece_empty[at.slot], at.parity ^ 1);
    if (leader) {
      shared.pieces[at.slot] = next;
      arrive(&shared.piece_full[at.slot]);
    }
    at.advance();
    if (next.units > 0) taken = take();
    load_queries(shared, p, q_map, run, ordinal);
    if (is_first) clean(p);
    if (next.units == 0) return;
    run = next;
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
    for (int i = 0; i < kPieceSlots; ++i) {
      barrier_init(&shared.piece_full[i], 1);
      barrier_init(&shared.piece_empty[i], kMathWarpgroups);
    }
    fence_barrier_init();
  }
  const auto units_of = [&](int sequence) { return extent_of(p, sequence).units(); };
  indexer_logits::find_run(shared.plan, p.batch, units_of, [&](int64_t units) {
    if (threadIdx.x == 0) shared.units = units;
    return units_of_runs(p, units);
  });

  if (threadIdx.x < kMathThreads) {
    multiply(shared, p, threadIdx.x);
    return;
  }
  const int warp = (threadIdx.x - kMathThreads) / 32;
  if (warp < kMathWarpgroups) {
    Feeder<Element, kC>{shared, p, k_map, warp}.run();
  } else {
    run_query_warp(shared, p, q_map);
  }
}

}  // namespace dsa::indexer_logits_paged
