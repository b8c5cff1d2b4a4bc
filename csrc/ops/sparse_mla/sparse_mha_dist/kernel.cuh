// Attention weights summed over heads, of tiles of 128 queries and 256 keys. Math: docs/sparse_mla/sparse_mha.md.
//
// Warp specialization. Who does what (group g is warpgroup g and has 64 queries):
//
//   role     threads                  registers  does                                    waits on        signals
//   compute  warpgroups 0, 1          232        S = Q K^T, sums += exp(scale S - lse)   q_full, k_full  q_empty,
//                                                of each head; stores sums               rope_full       k_empty
//   keys     thread 0 of warp 0 of    40         loads keys, those of all heads once     k_empty         k_full,
//            warpgroup 2                                                                                 rope_full
//   queries  thread 0 of warp 1 of    40         loads queries                           q_empty         q_full
//            warpgroup 2
//
// The sums of a group, 64 x 256, stay in registers. Its scores are those of one block of 128 keys at a time. While a
// group computes exponentials, the tensor cores compute the scores of the other group.
#pragma once

#include "ops/sparse_mla/sparse_mha/load.cuh"
#include "ops/sparse_mla/sparse_mha/scale.cuh"
#include "params.h"
#include "schedule.cuh"
#include "sm90/math.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/warpgroup.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mha_dist {

using namespace dsa::tiles;

inline constexpr int kGroups = 2, kGroupRows = kBlock / kGroups, kGroupWarps = kGroups * kWarpsPerWarpgroup;
inline constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
inline constexpr int kComputeRegisters = 232, kCopyRegisters = 40, kStartRegisters = 168;
inline constexpr int kQueryStages = 2, kKeyStages = 3;

struct Maps {
  CUtensorMap q, k, k_rope;
};

struct SharedStorage {
  alignas(1024) Bf16 queries[kQueryStages][kGroups][kGroupRows * kColumns];
  Bf16 keys[kKeyStages][kBlock * kNope];
  Bf16 rope_keys[kTileBlocks][kBlock * kRope];
  uint64_t q_full[kQueryStages], q_empty[kQueryStages];
  uint64_t k_full[kKeyStages], k_empty[kKeyStages];
  uint64_t rope_full;
};

// Run by one thread.
__device__ __forceinline__ void copy_keys(SharedStorage& shared, const Item& item, const Maps& maps) {
  arrive_and_expect(&shared.rope_full, item.key_blocks * sizeof(shared.rope_keys[0]));
  for (int i = 0; i < item.key_blocks; ++i) {
    load_chunks<kBlock>(shared.rope_keys[i], 0, 1, maps.k_rope, 0, (item.key_block + i) * kBlock, item.batch,
                        &shared.rope_full);
  }
  Ring<kKeyStages> ring;
#pragma unroll 1
  for (int head = item.head; head < item.end_head; ++head) {
#pragma unroll 1
    for (int i = 0; i < item.key_blocks; ++i) {
      wait(&shared.k_empty[ring.slot], ring.parity ^ 1);
      uint64_t* full = &shared.k_full[ring.slot];
      arrive_and_expect(full, sizeof(shared.keys[0]));
      load_chunks<kBlock>(shared.keys[ring.slot], 0, 2, maps.k, head, (item.key_block + i) * kBlock, item.batch, full);
      ring.advance();
    }
  }
}

// Run by one thread.
__device__ __forceinline__ void copy_queries(SharedStorage& shared, const Item& item, const Maps& maps) {
  Ring<kQueryStages> ring;
#pragma unroll 1
  for (int head = item.head; head < item.end_head; ++head) {
    wait(&shared.q_empty[ring.slot], ring.parity ^ 1);
    uint64_t* full = &shared.q_full[ring.slot];
    arrive_and_expect(full, sizeof(shared.queries[0]));
    for (int g = 0; g < kGroups; ++g) {
      load_chunks<kGroupRows>(shared.queries[ring.slot][g], 0, 3, maps.q, head, item.block * kBlock + g * kGroupRows,
                              item.batch, full);
    }
    ring.advance();
  }
}

// The lse of a lane's two rows, read a head ahead.
class Denominators {
  const float* g_lse_[2];  // of head 0
  float lse_[2];

 public:
  __device__ __forceinline__ Denominators(const Params& p, const Item& item, int first_query) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = min(first_query + 8 * r, p.seq_q - 1);
      g_lse_[r] = p.lse + (int64_t{item.batch} * p.seq_q + query) * p.heads;
    }
    load(item.head);
  }
  __device__ __forceinline__ void load(int head) {
    lse_[0] = __ldg(g_lse_[0] + head), lse_[1] = __ldg(g_lse_[1] + head);
  }
  __device__ __forceinline__ float base(int r) const { return base_of_lse(lse_[r]); }
};

// Scores of 64 queries and 128 keys.
struct ScoreMma {
  NarrowScoreMma<kBlock> mma;
  int thread;  // of the warpgroup

  // k-steps in the order of sparse_mha_fwd: the same scores to the bit.
  template <class Scores>
  __device__ __forceinline__ void start(Bf16* queries, Bf16* keys, Bf16* rope_keys, Scores& r_s) {
    using namespace cute;
    const auto slice = mma.get_slice(thread);
    const auto r_q = slice.partition_fragment_A(make_tensor(make_smem_ptr(queries), RowsByColumns<kNope>{}));
    const auto r_q_rope =
        slice.partition_fragment_A(make_tensor(make_smem_ptr(queries + kGroupRows * kNope), RowsByColumns<kRope>{}));
    const auto r_k = slice.partition_fragment_B(make_tensor(make_smem_ptr(keys), HeadsByColumns<kBlock, kNope>{}));
    const auto r_k_rope =
        slice.partition_fragment_B(make_tensor(make_smem_ptr(rope_keys), HeadsByColumns<kBlock, kRope>{}));
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    multiply(mma, r_q, r_k, r_s);
    multiply_add(mma, r_q_rope, r_k_rope, r_s);
    warpgroup_commit_batch();
  }
};

template <class Scores, class Sums>
__device__ __forceinline__ void add_weights(const Scores& r_s, float scale_log2, const float (&base)[2], Sums& r_sum) {
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) r_sum(i) += exp2_fast(fmaf(r_s(i), scale_log2, base[i / 2 % 2]));
}

__device__ __forceinline__ void compute(SharedStorage& shared, const Params& p, const Item& item, int group,
                                        int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const float scale_log2 = copysignf(positive_scale_log2(p.sm_scale), p.sm_scale);
  const int first_query = item.block * kBlock + group * kGroupRows;
  ScoreMma score_mma{.thread = thread};
  Tensor r_s = partition_fragment_C(score_mma.mma, Shape<Int<kGroupRows>, Int<kBlock>>{});
  Tensor r_first = make_fragment_like(r_s), r_second = make_fragment_like(r_s);  // sums of the blocks of keys
  clear(r_first), clear(r_second);
  Denominators denominators(p, item, first_query + warp * 16 + lane / 4);
  Ring<kQueryStages> q_ring;
  Ring<kKeyStages> k_ring;
  float base[2];
  const auto add_block = [&](int index, auto& r_sum) {
    wait(&shared.k_full[k_ring.slot], k_ring.parity);
    score_mma.start(shared.queries[q_ring.slot][group], shared.keys[k_ring.slot], shared.rope_keys[index], r_s);
    warpgroup_wait<0>();
    if (lane == 0) arrive(&shared.k_empty[k_ring.slot]);
    if (lane == 0 && index + 1 == item.key_blocks) arrive(&shared.q_empty[q_ring.slot]);
    k_ring.advance();
    warpgroup_fence_operand(r_s);
    add_weights(r_s, scale_log2, base, r_sum);
  };

  wait(&shared.rope_full, 0);
#pragma unroll 1
  for (int head = item.head; head < item.end_head; ++head) {
    base[0] = denominators.base(0), base[1] = denominators.base(1);
    denominators.load(min(head + 1, item.end_head - 1));
    wait(&shared.q_full[q_ring.slot], q_ring.parity);
    add_block(0, r_first);
    if (item.key_blocks == 2) add_block(1, r_second);
    q_ring.advance();
  }

  const int stride = p.mask.kv_blocks * kBlock;
  float* g_sums = sums_of_row(p, item.batch, item.part, first_query) + item.key_block * kBlock;
  store_accumulators_to_global(g_sums, stride, r_first, thread);
  if (item.key_blocks == 2) store_accumulators_to_global(g_sums + kBlock, stride, r_second, thread);
}

__global__ void __launch_bounds__(kThreads, 1)
    sparse_mha_dist_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const Item item = item_at(p, blockIdx.x);
  if (item.key_blocks == 0) return;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages; ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], kGroupWarps);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.k_empty[i], kGroupWarps);
    }
    barrier_init(&shared.rope_full, 1);
    fence_barrier_init();
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.k_rope);
  }
  __syncthreads();
  if (warpgroup < kGroups) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute(shared, p, item, warpgroup, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0), lane = thread % kWarpThreads;
    if (warp == 0 && lane == 0) copy_keys(shared, item, maps);
    if (warp == 1 && lane == 0) copy_queries(shared, item, maps);
  }
}

}  // namespace dsa::sparse_mha_dist
