// dq of two blocks of queries: dq += dS k over the keys that any of them attends to, from the tiles of dS.
//
//   role     threads                 registers  does                                     waits on  signals
//   compute  warpgroups 0, 1         240        gradients of a block of queries          full      empty
//   copy     warp 0 of warpgroup 2   24         loads 64 keys and the dS of both blocks  empty     full
#pragma once

#include "common.cuh"
#include "sm90/mbarrier.cuh"
#include "tiles/accumulators.cuh"

namespace dsa::sparse_mha_bwd {

inline constexpr int kQueryWarpgroups = 2;  // each has one of the blocks
inline constexpr int kQueryThreads = (kQueryWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kQueryRegisters = 240;

struct QueryStorage {
  static constexpr int kSlots = 4;

  struct Slot {
    alignas(1024) Tile<kChunkColumns> scores[2][2];  // of each block of queries, 64 each
    alignas(1024) Tile<kColumns> keys;
  };

  Slot slots[kSlots];
  int blocks[kSlots];  // bits: whose dS are there
  uint64_t full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kQueryWarpgroups * kWarpsPerWarpgroup);
    }
  }
};

// Two blocks of queries, and heads_together heads, which a CTA takes in turn. Those with most keys of a causal mask
// come first.
struct QueryItem {
  int block, batch, first_head, end_head;  // the first block

  __device__ __forceinline__ QueryItem(const Params& p, int first, int end) {
    const int groups = (end - first + p.heads_together - 1) / p.heads_together;
    const int index = static_cast<int>(blockIdx.x);
    block = ((p.mask.q_blocks + 1) / 2 - 1 - index / (groups * p.batch)) * 2;
    batch = index / groups % p.batch;
    first_head = first + index % groups * p.heads_together;
    end_head = min(first_head + p.heads_together, end);
  }

  // Where the words of mask.tiles of block i begin.
  __device__ __forceinline__ int64_t words(const Params& p, int i) const {
    return (int64_t{batch} * p.mask.q_blocks + block + i) * p.mask.tile_words;
  }
  __device__ __forceinline__ bool has_second(const Params& p) const { return block + 1 < p.mask.q_blocks; }
};

// How many blocks of keys either block attends to. Run by one warp.
__device__ __forceinline__ int count_key_blocks(const Params& p, const QueryItem& item, int lane) {
  int count = 0;
  for (int i = lane; i < p.mask.tile_words; i += kWarpThreads) {
    uint32_t word = __ldg(p.mask.tiles + item.words(p, 0) + i);
    if (item.has_second(p)) word |= __ldg(p.mask.tiles + item.words(p, 1) + i);
    count += __popc(word);
  }
  return __reduce_add_sync(~0u, count);
}

__device__ __forceinline__ void copy_scores(QueryStorage& shared, const Params& p, const Maps& maps,
                                            const QueryItem& item, int first_head, int lane) {
  Ring<QueryStorage::kSlots> ring;
  fence_async_proxy_global();
  for (int head = item.first_head; head < item.end_head; ++head) {
    const char* g_scores = scores_of(p, item.batch, head, first_head);
    for (int first = 0; first < p.mask.tile_words; first += kWarpThreads) {
      uint32_t words_of_lane[2] = {};
      int tiles_of_lane[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + lane >= p.mask.tile_words || (i > 0 && !item.has_second(p))) continue;
        words_of_lane[i] = __ldg(p.mask.tiles + item.words(p, i) + first + lane);
        tiles_of_lane[i] = __ldg(p.tile_offsets + item.words(p, i) + first + lane);
      }
      for (int from = 0; from < min(kWarpThreads, p.mask.tile_words - first); ++from) {
        const uint32_t words[2] = {__shfl_sync(~0u, words_of_lane[0], from), __shfl_sync(~0u, words_of_lane[1], from)};
        int tiles[2] = {__shfl_sync(~0u, tiles_of_lane[0], from), __shfl_sync(~0u, tiles_of_lane[1], from)};
        for (uint32_t left = words[0] | words[1]; left != 0; left &= left - 1) {
          const int bit = __ffs(left) - 1, key_block = (first + from) * 32 + bit;
          const bool has[2] = {(words[0] >> bit & 1) != 0, (words[1] >> bit & 1) != 0};
          for (int half = 0; half < 2; ++half) {
            wait(&shared.empty[ring.slot], ring.parity ^ 1);
            if (lane == 0) {
              auto& slot = shared.slots[ring.slot];
              uint64_t* full = &shared.full[ring.slot];
              shared.blocks[ring.slot] = has[0] + 2 * has[1];
              arrive_and_expect(full, static_cast<int>(sizeof(slot.keys)) + (has[0] + has[1]) * 2 * kChunkBytes);
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                if (!has[i]) continue;
                bulk_load_once(slot.scores[i], g_scores + int64_t{tiles[i]} * kTileBytes + half * 2 * kChunkBytes,
                               2 * kChunkBytes, full);
              }
              load_keys(slot.keys, maps, head, key_block * kBlock + half * kTileRows, item.batch, full);
            }
            __syncwarp();
            ring.advance();
          }
          tiles[0] += has[0], tiles[1] += has[1];
        }
      }
    }
  }
}

__device__ __forceinline__ void compute_queries(QueryStorage& shared, const Params& p, const QueryItem& item, int own,
                                                int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads;
  TransposedMma<kColumns> mma;
  Tensor r_low = partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});  // dq of the first 64 queries
  Tensor r_high = make_fragment_like(r_low);
  mma.accumulate_ = GMMA::ScaleOut::One;
  const int slots = 2 * count_key_blocks(p, item, lane);
  Ring<QueryStorage::kSlots> ring;
  for (int head = item.first_head; head < item.end_head; ++head) {
    clear(r_low);
    clear(r_high);
    for (int left = slots; left > 0; --left) {
      auto& slot = shared.slots[ring.slot];
      wait(&shared.full[ring.slot], ring.parity);
      if (shared.blocks[ring.slot] >> own & 1) {
        const auto slice = mma.get_slice(thread);
        const auto r_keys =
            slice.partition_fragment_B(make_tensor(make_smem_ptr(slot.keys), ColumnsByRows<kColumns>{}));
        const auto add_product = [&](auto& chunk, auto& r_dq) {
          const auto r_ds =
              slice.partition_fragment_A(make_tensor(make_smem_ptr(chunk), ColumnsByRows<kChunkColumns>{}));
          multiply_add(mma, r_ds, r_keys, r_dq);
        };
        warpgroup_fence_operand(r_low);
        warpgroup_fence_operand(r_high);
        warpgroup_arrive();
        add_product(slot.scores[own][0], r_low);
        add_product(slot.scores[own][1], r_high);
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_low);
        warpgroup_fence_operand(r_high);
      }
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[ring.slot]);
      ring.advance();
    }
    const auto store = [&](auto& r_dq, int half) {
#pragma unroll
      for (int i = 0; i < r_dq.size(); ++i) r_dq(i) *= p.sm_scale;
      const int first = (item.block + own) * kBlock + half * kTileRows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = first + stored_query(thread / kWarpThreads * 16 + lane / 4 + 8 * r);
        store_row<kColumns>(row_of(p.dq, item.batch, query, head), query < p.seq_q, r_dq, r, lane);
      }
    };
    store(r_low, 0);
    store(r_high, 1);
  }
}

// Heads [first_head, end_head), whose dS are stored.
__global__ void __launch_bounds__(kQueryThreads, 1)
    query_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                           const __grid_constant__ int first_head, const __grid_constant__ int end_head) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<QueryStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.init();
    fence_barrier_init();
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.k_rope);
  }
  __syncthreads();
  const QueryItem item(p, first_head, end_head);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup < kQueryWarpgroups) {
    set_registers<kQueryRegisters, kStartRegisters>();
    compute_queries(shared, p, item, warpgroup, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0);
    if (warp == 0) copy_scores(shared, p, maps, item, first_head, thread);
    if (warp == 1 && thread % kWarpThreads == 0) start_next_kernel();
  }
}

}  // namespace dsa::sparse_mha_bwd
