// For each key that a query lists, the sum over heads of a function of q_h . k_i.
//
// Warp specialization: two score warpgroups, and one gather warpgroup as producer, or two for up to 128 columns. Who
// does what:
//
//   role     warpgroups  registers   does                                      waits on        signals
//   score    0, 1        160 or 200  S^T = K Q^T of every other tile; sums     visible_full,   empty, q_empty
//                                    over heads, to global memory              q_full, full
//                                    with normalize: divides the row           others_written  others_written
//   gather   2 (and 3)   96 or 88    keys and visibility mask of a tile        empty           full, visible_full
//                                    first of them: Q of an item               q_empty         q_full (by TMA)
//                                    kHidden in the slots after the last tile
//
// A CTA walks over queries (persistent kernel); in the last round, over pieces of them. Tiles of 64 keys pass through a
// ring buffer in parts of some columns, so that a stage is released as soon as its part has been multiplied. Heads are
// the N dimension of S^T = K Q^T, so that a thread holds two keys for a quarter of all heads: while one score warpgroup
// takes exponentials and adds them up, the other multiplies. Registers: 160 and 96 with two gather warpgroups, 200 and
// 88 with one.
#pragma once

#include <cutlass/cutlass.h>

#include "config.h"
#include "items.cuh"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/gather.cuh"
#include "tiles/mma.cuh"
#include "tiles/softmax.cuh"

namespace dsa::listed_keys {

using namespace dsa::tiles;

static_assert(kTileKeys == kTileRows && kGatherRows == kTileRows && kChunkColumns == tiles::kChunkColumns);

// exp(scale * score - lse): the attention probability of a key.
struct Attention {
  static constexpr float kHidden = 0.f, kNoHead = -INFINITY;  // for hidden slots; for missing heads
  static constexpr bool kPartial = false;                     // fewer heads than the instance has
  float scale;

  __device__ __forceinline__ explicit Attention(const Params& p) : scale(p.sm_scale * kLog2E) {}
  static __device__ __forceinline__ float head_factor(float lse) { return base_of_lse(lse); }
  __device__ __forceinline__ float add(float sum, float score, float base) const {
    return sum + exp2_fast(fmaf(score, scale, base));
  }
};

// relu(score) * weight: the indexer's score of a key.
struct Indexer {
  static constexpr float kHidden = -INFINITY, kNoHead = 0.f;
  static constexpr bool kPartial = false;

  __device__ __forceinline__ explicit Indexer(const Params&) {}
  static __device__ __forceinline__ float head_factor(float weight) { return weight; }
  __device__ __forceinline__ float add(float sum, float score, float weight) const {
    return fmaf(relu(score), weight, sum);
  }
};

// The same with fewer heads than the instance has. A function of its own, because its checks cost up to 4 %.
template <class Function>
struct Partial : Function {
  static constexpr bool kPartial = true;
  using Function::Function;
};

template <Config kC>
struct SharedStorage {
  alignas(1024) Bf16 q[kC.heads * kC.columns];
  alignas(1024) Bf16 keys[kC.slots()][kC.slot_chunks() * kChunkElements];
  uint32_t visible[kC.visible_slots()][4];              // per tile, see publish_visible
  float sums[2][kScoreWarpgroups][kWarpsPerWarpgroup];  // row sums, double-buffered by item
  uint64_t q_full[kC.parts()], q_empty[kC.parts()];
  uint64_t full[kC.slots()], empty[kC.slots()];
  uint64_t visible_full[kC.visible_slots()];
  uint64_t others_written[2];  // double-buffered by item
};

// Producer: loads Q and keys, and fills the slots after the last tile. Run by each gather warpgroup, with its number in
// `warpgroup`. The first ids of an item are loaded with the last tile of the item before.
template <Config kC, class Function>
__device__ __forceinline__ void gather(SharedStorage<kC>& shared, const ParamsOf<kC>& p, const CUtensorMap& q_map,
                                       int warpgroup, int thread) {
  constexpr int kGatherers = kC.gather_warpgroups(), kParts = kC.parts();
  static_assert(kC.slots() % (kGatherers * kParts) == 0 || kGatherers == 1, "slots change hands");
  const uint32_t piece_offset = swizzled_offset(gather_row(thread), gather_piece(thread));
  Ring<kC.slots()> ring;
  Ring<kC.visible_slots()> visible_ring;
  // The tiles of all items form one sequence, which the gather warpgroups take in turn.
  ring.advance(warpgroup * kParts), visible_ring.advance(warpgroup);
  int first_tile = warpgroup, q_tile = 0;  // the first item's Q need not wait
  uint32_t q_parity = 1;
  const Items<kC> items{p};
  Item item(p, items.load(blockIdx.x));
  Slots slots(p, item, first_tile, thread);
  int ids[kGatherRowsPerThread];  // of this warpgroup's next tile
  slots.load<kGatherers>(ids);
  for (int index = blockIdx.x; index < items.count(); index += gridDim.x) {
    const Item next(p, items.load(index + gridDim.x < unsigned(items.count()) ? index + gridDim.x : index));
    const int next_first_tile = (first_tile + item.tiles) % kGatherers;
    const Slots next_slots(p, next, next_first_tile, thread);
    for (int block = 0; block < rows_of_item(p); ++block) {
      float* g_row = item.row(p, block);
      for (int slot = item.first_unused + warpgroup * kWarpgroupThreads + thread; slot < p.topk;
           slot += kGatherers * kWarpgroupThreads) {
        g_row[slot] = Function::kHidden;
      }
    }
    // Only the first gather warpgroup loads Q: a thread that waits on a barrier must wait in every phase.
    bool q_is_loaded = warpgroup != 0;
    const auto load_q = [&](int part) {
      if (thread != 0) return;
      wait(&shared.q_empty[part], q_parity);
      arrive_and_expect(&shared.q_full[part], kC.slot_chunks() * kC.heads * kSwizzleRowBytes);
      for (int chunk = part * kC.slot_chunks(); chunk < (part + 1) * kC.slot_chunks(); ++chunk) {
        tma_load(shared.q + chunk * kC.heads * kChunkColumns, &q_map,
                 {chunk * kChunkColumns, 0, item.group, item.s, item.b}, &shared.q_full[part]);
      }
    };
    if (kGatherers > 1 && !q_is_loaded) {
      for (int part = 0; part < kParts; ++part) load_q(part);
      q_is_loaded = true;
    }
    const char* g_keys = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + item.b * p.kv_stride_b +
                                                       item.group * p.kv_stride_g) +
                         gather_piece(thread) * 16;
    for (int tile = first_tile; tile < item.tiles; tile += kGatherers, visible_ring.advance(kGatherers)) {
      const bool is_last = tile + kGatherers >= item.tiles;
      const bool loads_q = !q_is_loaded && (tile >= q_tile || is_last);
      const GatherRows rows(g_keys, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, item.ids);
      if (is_last) slots = next_slots;
      slots.load<kGatherers>(ids);
      publish_visible(shared.visible[visible_ring.slot], rows, thread);
      if (thread % kWarpThreads == 0) arrive(&shared.visible_full[visible_ring.slot]);
      cute::for_each(cute::make_int_sequence<kParts>{}, [&](auto part) {
        constexpr int kBegin = part * kC.slot_chunks(), kEnd = kBegin + kC.slot_chunks();
        if (loads_q) load_q(part);  // before the wait: the stage may not become empty without it
        wait(&shared.empty[ring.slot], ring.parity ^ 1);
        rows.template copy<kBegin, kBegin, kEnd>(shared_address(shared.keys[ring.slot]) + piece_offset);
        arrive_after_copies(&shared.full[ring.slot]);
        ring.advance();
      });
      ring.advance((kGatherers - 1) * kParts);
      q_is_loaded |= loads_q;
    }
    if (first_tile >= item.tiles) {  // no tile of this item is this warpgroup's
      slots = next_slots;
      slots.load<kGatherers>(ids);
    }
    item = next, first_tile = next_first_tile;
    q_tile = kC.q_tile(), q_parity ^= 1;
  }
}

// Adds what the heads give to a lane's two keys; with two blocks of heads, to each or to both together.
template <Config kC, class Scores, class Function, int kBlocks>
__device__ __forceinline__ void add_heads(const Scores& r_s, const Function& function,
                                          const float (&head_factors)[kC.heads / 4], int group_heads,
                                          bool per_head_block, int lane, float (&sums)[kBlocks][2]) {
#pragma unroll
  for (int i = 0; i < size(r_s); ++i) {
    const int first_head = i / 4 * 8, c = i / 4 * 2 + i % 2;
    if (Function::kPartial && i % 4 == 0 && first_head >= group_heads) break;
    float& sum = sums[first_head / kBlockHeads][i / 2 % 2];
    const float with_head = function.add(sum, r_s(i), head_factors[c]);
    // A missing head has Q = 0, and 0 times a key that is not finite is NaN.
    sum = !Function::kPartial || column_in_row(c, lane) < group_heads ? with_head : sum;
  }
  if (kBlocks == 2 && !per_head_block) {
    sums[0][0] += sums[1][0];
    sums[0][1] += sums[1][1];
  }
}

// The numbers of the heads of a lane's accumulator columns.
template <Config kC, class Function>
__device__ __forceinline__ void load_head_factors(const Params& p, const Item& item, const Function& function,
                                                  int group_heads, int lane, float (&head_factors)[kC.heads / 4]) {
  const float* g_factors = p.head_factors + item.b * p.head_factors_stride_b + item.s * p.head_factors_stride_s;
#pragma unroll
  for (int c = 0; c < kC.heads / 4; ++c) {
    head_factors[c] =
        column_in_row(c, lane) < group_heads
            ? function.head_factor(
                  g_factors[(item.group * group_heads + column_in_row(c, lane)) * p.head_factors_stride_h])
            : Function::kNoHead;
  }
}

// Divides a row by the sum over all its tiles; the gatherers write zeros to the slots after those. The warpgroup that
// had the last tile does, after the other has written its part. It adds first what the one with the first tile has, so
// that the sum does not depend on the rows before.
template <Config kC>
__device__ __forceinline__ void divide_row(SharedStorage<kC>& shared, const Params& p, const Item& item, float row_sum,
                                           uint32_t item_count, int tiles_before, int warpgroup, int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, lanes);
  if (lane == 0) shared.sums[item_count % 2][warpgroup][warp] = row_sum;
  if (warpgroup == tiles_before % 2) {
    arrive(&shared.others_written[item_count % 2]);
  } else {
    wait(&shared.others_written[item_count % 2], item_count / 2 % 2);
    if (warpgroup == 0) {
      sync_warpgroup<1>();
    } else {
      sync_warpgroup<2>();
    }
    float sum = 0.f;
    for (int i = 0; i < kScoreWarpgroups; ++i) {
      const int added = (tiles_before - item.tiles + i) % kScoreWarpgroups;
      for (float warp_sum : shared.sums[item_count % 2][added]) sum += warp_sum;
    }
    sum = fmaxf(sum, 1e-10f);
    float* g_row = item.row(p, 0);
    const int slots = min(p.topk, item.tiles * kTileKeys);
    for (int i = thread; i < slots; i += kWarpgroupThreads) g_row[i] /= sum;
  }
}

// Consumer: scores every other tile and writes the sums. Run by each score warpgroup, with its number in `warpgroup`.
template <Config kC, class Function>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const ParamsOf<kC>& p, int warpgroup, int thread) {
  using namespace cute;
  constexpr int kParts = kC.parts(), kSteps = kC.slot_chunks() * kChunkColumns / 16,
                kBlocks = kC.heads > kBlockHeads ? 2 : 1;
  constexpr int kColumns = kC.heads / 4;  // of a thread's accumulator fragment
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  // After the reduction, a lane has the sum of one key.
  const int odd = lane & 1, warp_key = odd * 8 + lane / 4;
  const bool writes = (lane & 2) == 0;
  const Function function(p);

  NarrowScoreMma<kC.heads> mma;
  const auto slice = mma.get_slice(thread);
  const Tensor r_q =
      slice.partition_fragment_B(make_tensor(make_smem_ptr(shared.q), HeadsByColumns<kC.heads, kC.columns>{}));
  const Tensor r_keys = slice.partition_fragment_A(
      make_tensor(make_smem_ptr(shared.keys[0]),
                  tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{},
                                Shape<_64, Int<kC.slot_chunks() * kChunkColumns>, Int<kC.slots()>>{})));
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kC.heads>>{});

  // The tiles of all items form one sequence, of which each score warpgroup takes every other.
  Ring<kC.slots()> ring;
  Ring<kC.visible_slots()> visible_ring;
  if (warpgroup == 1) ring.advance(kParts), visible_ring.advance();
  int tiles_before = 0;
  uint32_t item_count = 0;
  const Items<kC> items{p};
  int next = items.load(blockIdx.x);
  for (int index = blockIdx.x; index < items.count(); index += gridDim.x) {
    const Item item(p, kC.unmerged ? next : index);
    next = items.load(index + gridDim.x);
    const uint32_t q_parity = item_count % 2;
    const int first_tile = (warpgroup - tiles_before) & 1;
    float head_factors[kColumns];
    const int group_heads = p.heads / p.groups;
    load_head_factors<kC>(p, item, function, group_heads, lane, head_factors);
    float row_sum = 0.f;
    for (int tile = first_tile; tile < item.tiles; tile += kScoreWarpgroups) {
      const bool is_first = tile == first_tile, is_last = tile + kScoreWarpgroups >= item.tiles;
      wait(&shared.visible_full[visible_ring.slot], visible_ring.parity);
      const bool visible = shared.visible[visible_ring.slot][warp_key / 4] >> (warp_key % 4 * 8 + warp) & 1;
      visible_ring.advance(kScoreWarpgroups);
      int slot_before = 0;
      const auto release = [&](int part, int slot) {
        if (lane != 0) return;
        arrive(&shared.empty[slot]);
        if (is_last) arrive(&shared.q_empty[part]);
      };
      warpgroup_fence_operand(r_s);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (is_first) wait(&shared.q_full[part], q_parity);
        wait(&shared.full[ring.slot], ring.parity);
        fence_async_proxy();
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          gemm(mma, r_keys(_, 0, step, ring.slot), r_q(_, 0, part * kSteps + step), r_s(_, 0, 0));
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        if (part > 0) {
          warpgroup_wait<1>();
          release(part - 1, slot_before);
        }
        slot_before = ring.slot;
        ring.advance();
      }
      warpgroup_wait<0>();
      release(kParts - 1, slot_before);
      ring.advance(kParts);
      warpgroup_fence_operand(r_s);

      float sums[kBlocks][2] = {};
      add_heads<kC>(r_s, function, head_factors, group_heads, p.per_head_block, lane, sums);
      const int slot = (item.first + tile) * kTileKeys + warp * 16 + warp_key;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block >= rows_of_item(p)) break;
        float sum =
            (odd ? sums[block][1] : sums[block][0]) + __shfl_xor_sync(~0u, odd ? sums[block][0] : sums[block][1], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (!visible) sum = Function::kHidden;
        if (writes && slot < p.topk) item.row(p, block)[slot] = sum;
        if (writes) row_sum += sum;
      }
    }
    if (first_tile >= item.tiles && lane == 0) {
      // Wait for the Q that this warpgroup skips: an earlier arrival would count for the phase before.
      for (int part = 0; part < kParts; ++part) {
        wait(&shared.q_full[part], q_parity);
        arrive(&shared.q_empty[part]);
      }
    }
    __syncwarp();
    tiles_before += item.tiles;

    if (p.normalize) divide_row(shared, p, item, row_sum, item_count, tiles_before, warpgroup, thread);
    ++item_count;
  }
}

template <int kKeyColumns, int kHeads, class Function, bool kUnmerged>
__global__ void __launch_bounds__(Config{kKeyColumns, kHeads}.threads(), 1)
    listed_keys_kernel(const __grid_constant__ ParamsOf<Config{kKeyColumns, kHeads, kUnmerged}> p,
                       const __grid_constant__ CUtensorMap q_map) {
  constexpr Config kC{kKeyColumns, kHeads, kUnmerged};
  extern __shared__ __align__(1024) char shared_bytes_[];
  SharedStorage<kC>& shared = *reinterpret_cast<SharedStorage<kC>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    for (int i = 0; i < kC.parts(); ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], kScoreWarpgroups * kWarpsPerWarpgroup);
    }
    for (int i = 0; i < kC.slots(); ++i) {
      barrier_init(&shared.full[i], kWarpgroupThreads);
      barrier_init(&shared.empty[i], kWarpsPerWarpgroup);
    }
    for (uint64_t& barrier : shared.visible_full) barrier_init(&barrier, kWarpsPerWarpgroup);
    for (uint64_t& barrier : shared.others_written) barrier_init(&barrier, kWarpgroupThreads);
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup < kScoreWarpgroups) {
    grow_registers<kC.score_registers()>();
    score<kC, Function>(shared, p, warpgroup, thread);
  } else {
    shrink_registers<kC.gather_registers()>();
    gather<kC, Function>(shared, p, q_map, warpgroup - kScoreWarpgroups, thread);
  }
}

}  // namespace dsa::listed_keys
