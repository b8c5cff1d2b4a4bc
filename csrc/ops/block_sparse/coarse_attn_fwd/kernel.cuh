// Dense attention of blocks of 64 queries to all keys, forward, and the mean of its probabilities over each block.
// Math: docs/block_sparse/coarse_attn.md.
//
// Warp specialization. Who does what (group g is warpgroup g):
//
//   role     threads                registers  does                             waits on          signals
//   compute  warpgroups 0, 1, 2     160        sweep 1: S = Q K^T, sums of      queries_full[g],  empty,
//                                              exponentials                     full              queries_empty[g]
//                                              sweep 2: P, means, O += P V      full              empty
//                                              shared item: joins the parts     named barrier
//   copy     1 thread, warpgroup 3  32         loads queries (TMA)              queries_empty[g]  queries_full[g]
//                                              loads keys and values (TMA)      empty             full
//
// An item is three query blocks of a head, one per warpgroup, which all read every tile of keys; or one block, whose
// tiles the three take in turn (shared item). Tiles pass through one ring buffer in two sweeps: keys, for the sums of
// the exponentials; then keys and values in turn, for probabilities that need no further scaling.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "ops/block_sparse/operands.cuh"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "softmax.cuh"
#include "tiles/mma.cuh"
#include "tiles/softmax.cuh"

namespace dsa::coarse_attn_fwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
inline constexpr int kComputeRegisters = 160, kCopyRegisters = 32, kStartRegisters = 128;
inline constexpr int kGroupsBarrier = 1 + kGroups;  // of all compute warpgroups; 1, 2, 3 are their own

template <int kColumns>
struct SharedStorage {
  static constexpr int kSlots = 6 * 128 / kColumns;

  alignas(1024) Bf16 tiles[kSlots][kBlock * kColumns];
  Bf16 queries[kGroups][kBlock * kColumns];
  union {  // staging: of O to global memory, and of a shared item's parts to the first warpgroup
    Bf16 out[kGroups][kBlock * kColumns];
    float partial_out[kGroups - 1][kBlock * kColumns / kWarpgroupThreads][kWarpgroupThreads];
  };
  RowSum row_sums[kGroups][kBlock];                           // of a shared item
  float large_tops[kGroups][kBlock];                          // subtracted from the scores of some warps
  float column_sums[kGroups][2][kWarpsPerWarpgroup][kBlock];  // double-buffered by tile
  uint64_t full[kSlots], empty[kSlots], queries_full[kGroups], queries_empty[kGroups];
};

struct Item {
  int first, head, batch;
  bool is_shared;  // one block, whose tiles of keys the groups divide

  __device__ __forceinline__ Item(const Params& p, int index) {
    const int triples = p.triples * p.heads * p.batch;
    is_shared = index >= triples;
    const int here = is_shared ? index - triples : index, each = is_shared ? p.singles() : p.triples;
    const int row = here / each;
    first = is_shared ? kGroups * p.triples + here % each : kGroups * (here % each);
    head = row % p.heads;
    batch = row / p.heads;
  }
  __device__ __forceinline__ int block(int group) const { return is_shared ? first : first + group; }
  __device__ __forceinline__ bool has_tile(int group, int tile) const { return !is_shared || tile % kGroups == group; }
};

// Producer. Run by one thread.
template <int kColumns>
__device__ __forceinline__ void copy(SharedStorage<kColumns>& shared, const Params& p, const CUtensorMap& q_map,
                                     const CUtensorMap& k_map, const CUtensorMap& v_map) {
  Ring<SharedStorage<kColumns>::kSlots> ring;
  uint32_t queries_parity = 1;
  for (int index = blockIdx.x; index < p.items(); index += gridDim.x, queries_parity ^= 1) {
    const Item item(p, index);
    for (int group = 0; group < kGroups; ++group) {
      wait(&shared.queries_empty[group], queries_parity);
      load_block<kColumns>(shared.queries[group], &q_map, item.head, item.block(group) * kBlock, item.batch,
                           &shared.queries_full[group]);
    }
    const int kv_head = item.head / (p.heads / p.kv_heads);
    const auto send = [&](const CUtensorMap& map, int tile) {
      wait(&shared.empty[ring.slot], ring.parity ^ 1);
      load_block<kColumns>(shared.tiles[ring.slot], &map, kv_head, tile * kBlock, item.batch, &shared.full[ring.slot]);
      ring.advance();
    };
    for (int tile = 0; tile < p.kv_blocks; ++tile) send(k_map, tile);
    for (int tile = 0; tile < p.kv_blocks; ++tile) send(k_map, tile), send(v_map, tile);
  }
}

// Adds the values of the lane across; each lane keeps one half of the 2 kHalf columns.
template <int kHalf>
__device__ __forceinline__ void add_rows_across(float (&r)[kBlock / 4], int lane) {
  const bool is_upper = lane & kHalf * 2;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = is_upper ? r[i + kHalf] : r[i], given = is_upper ? r[i] : r[i + kHalf];
    r[i] = kept + __shfl_xor_sync(~0u, given, kHalf * 2);
  }
}

// Sums over a warp's 16 rows of 64 columns, of which a lane has a pair in each eight. It gets those of eight lane / 4.
__device__ __forceinline__ float2 sum_rows(float (&r)[kBlock / 4], int lane) {
  add_rows_across<8>(r, lane);
  add_rows_across<4>(r, lane);
  add_rows_across<2>(r, lane);
  return {r[0], r[1]};
}

// Synchronizes all compute warpgroups.
__device__ __forceinline__ void sync_groups() { sync_threads<kGroupsBarrier, kGroups * kWarpgroupThreads>(); }

// Q as an operand, with `flip` for its signs. Rows after the last of `rows` repeat it: zeros times an infinite key
// would be NaN.
template <int kColumns>
__device__ __forceinline__ void load_queries(uint32_t (&pairs)[kColumns / 16][4], const Bf16* s_queries, int rows,
                                             uint32_t flip, int warp, int lane) {
  const int row = min(warp * 16 + lane % 16, rows - 1);
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    load_matrices(shared_address(s_queries + i / 4 * kChunkElements) + swizzled_offset(row, i % 4 * 2 + lane / 16),
                  pairs[i]);
    for (uint32_t& pair : pairs[i]) pair ^= flip;
  }
}

template <class Scores>
__device__ __forceinline__ void subtract_tops(Scores& r_s, const float* s_tops) {
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) r_s(i) -= s_tops[i / 2 % 2 * 8];
}

// Writes the lse of this lane's rows, and returns in `lse` the base-2 logarithms from which the exponents of
// probabilities are computed: those are scaled scores minus lse. If lse is large in a row of the warp, which is then
// returned, scores have to be reduced by the rows' tops before they are scaled.
template <int kColumns>
__device__ __forceinline__ bool finish_sums(SharedStorage<kColumns>& shared, const Params& p, const Item& item,
                                            const RowSums& sums, int group, int first_row, int lane, float (&lse)[2]) {
  const int first_query = item.block(group) * kBlock + first_row;
  const bool is_writer = lane % 4 == 0 && (!item.is_shared || group == 0);
  float* g_lse = p.lse + (static_cast<int64_t>(item.batch) * p.heads + item.head) * p.seq_q;
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + 8 * r;
    lse[r] = log_of_sum(__fmul_rn(sums.rows[r].top, p.scale_log2), log2_fast(sums.rows[r].sum));
    if (is_writer && query < p.seq_q) g_lse[query] = lse[r] * kLn2;
  }
  const bool any_large = __any_sync(~0u, !(fmaxf(fabsf(lse[0]), fabsf(lse[1])) <= kLargeLse));
  if (any_large) {
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) shared.large_tops[group][first_row + 8 * r] = sums.rows[r].top;
      lse[r] = log2_fast(sums.rows[r].sum);
    }
    __syncwarp();
  }
  for (int r = 0; r < 2; ++r) {
    if (first_query + 8 * r >= p.seq_q) lse[r] = INFINITY;  // rows after the last query have no weight
  }
  return any_large;
}

// Scores to probabilities, as an operand, and their sums over the lane's two rows.
template <class Scores>
__device__ __forceinline__ void compute_probabilities(Scores& r_s, float scale_log2, const float (&lse)[2],
                                                      uint32_t (&pairs)[kBlock / 4], float (&columns)[kBlock / 4]) {
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, -lse[i / 2 % 2]));
#pragma unroll
  for (int i = 0; i < r_s.size(); i += 4) {
    pairs[i / 2] = pack_bf16(r_s(i), r_s(i + 1)), pairs[i / 2 + 1] = pack_bf16(r_s(i + 2), r_s(i + 3));
    columns[i / 2] = r_s(i) + r_s(i + 2), columns[i / 2 + 1] = r_s(i + 1) + r_s(i + 3);
  }
}

// Sums of columns over the warpgroup's rows, in a fixed order, times `share`: the scores of the tile's first `keys`
// keys.
__device__ __forceinline__ void write_scores(float (&columns)[kBlock / 4], float (&s_sums)[kWarpsPerWarpgroup][kBlock],
                                             float* g_scores, int keys, float share, int group, int thread) {
  const int lane = thread % kWarpThreads;
  reinterpret_cast<float2*>(s_sums[thread / kWarpThreads])[lane] = sum_rows(columns, lane);
  sync_warpgroup(1 + group);
  if (thread < kBlock && thread < keys) {
    g_scores[thread] = ((s_sums[0][thread] + s_sums[1][thread]) + (s_sums[2][thread] + s_sums[3][thread])) * share;
  }
}

// Joins the sums of a shared item's rows, of which each group has its tiles' part.
__device__ __forceinline__ void join_sums(RowSum (&s_sums)[kGroups][kBlock], RowSums& sums, float scale_log2, int group,
                                          int first_row, int lane) {
  if (lane % 4 == 0) {
    for (int r = 0; r < 2; ++r) s_sums[group][first_row + 8 * r] = sums.rows[r];
  }
  sync_groups();
  sums.join(s_sums, first_row, scale_log2);
}

// Adds up the outputs of a shared item, in a fixed order; true for the warpgroup that then has it.
template <class Parts, class Out>
__device__ __forceinline__ bool join_outputs(Parts& parts, Out& r_out, int group, int thread) {
  if (group > 0) {
    for (int i = 0; i < r_out.size(); ++i) parts[group - 1][i][thread] = r_out(i);
  }
  sync_groups();
  if (group > 0) return false;
#pragma unroll
  for (int i = 0; i < r_out.size(); ++i) {
    for (const auto& part : parts) r_out(i) += part[i][thread];
  }
  sync_warpgroup(1);
  return true;
}

template <int kColumns>
__device__ __forceinline__ void compute(SharedStorage<kColumns>& shared, const Params& p, const CUtensorMap& out_map,
                                        int group, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  ScoreMmaFromRegisters score_mma;
  RowsMma<kColumns> value_mma;
  Tensor r_q = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, Int<kColumns / 16>>{});
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_p = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _4>{});
  Tensor r_out = partition_fragment_C(value_mma, Shape<_64, Int<kColumns>>{});
  auto& q_pairs = *reinterpret_cast<uint32_t (*)[kColumns / 16][4]>(r_q.data());
  auto& p_pairs = *reinterpret_cast<uint32_t (*)[kBlock / 4]>(r_p.data());

  Ring<SharedStorage<kColumns>::kSlots> ring;
  const auto wait_full = [&] { wait(&shared.full[ring.slot], ring.parity); };
  const auto release = [&] {
    if (lane == 0) arrive(&shared.empty[ring.slot]);
    ring.advance();
  };
  // Scores of the current tile; releases it. kReduced (subtract the rows' tops) and the last tile's end, both rare,
  // share a branch.
  constexpr int kPlain = kBlock - 1, kReduced = INT_MAX;
  const auto score = [&](int tile, int kind) {
    const auto r_k = score_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.tiles[ring.slot]), RowsByColumns<kColumns>{}));
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    multiply(score_mma, r_q, r_k, r_s);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_s);
    release();
    const int keys = p.seq_kv - tile * kBlock;
    if (keys <= kind) {
      if (kind == kReduced) subtract_tops(r_s, shared.large_tops[group] + warp * 16 + lane / 4);
      for_columns_from(keys, r_s, lane, [&](int i) { r_s(i) = -INFINITY; });
    }
  };
  const uint32_t flip = p.sm_scale < 0.f ? 0x80008000u : 0u;
  uint32_t queries_parity = 0;
  for (int index = blockIdx.x; index < p.items(); index += gridDim.x, queries_parity ^= 1) {
    const Item item(p, index);
    wait(&shared.queries_full[group], queries_parity);
    const int queries = min(kBlock, p.seq_q - item.block(group) * kBlock);
    load_queries<kColumns>(q_pairs, shared.queries[group], queries, flip, warp, lane);
    warpgroup_fence_operand(r_q);

    RowSums sums;
    for (int tile = 0; tile < p.kv_blocks; ++tile) {
      wait_full();
      if (!item.has_tile(group, tile)) {
        release();
        continue;
      }
      score(tile, kPlain);
      sums.add(r_s, p.scale_log2);
    }
    // Only after a product has waited for the loads: ptxas may move an arrival ahead of loads that are not complete.
    if (lane == 0) arrive(&shared.queries_empty[group]);

    const int first_row = warp * 16 + lane / 4, block = item.block(group);
    sums.add_lanes(p.scale_log2);
    if (thread == 0) tma_store_wait_read();  // of the previous item; long complete
    if (item.is_shared) join_sums(shared.row_sums, sums, p.scale_log2, group, first_row, lane);
    const int64_t head_row = static_cast<int64_t>(item.batch) * p.heads + item.head;
    float lse[2];
    const int kind = finish_sums(shared, p, item, sums, group, first_row, lane, lse) ? kReduced : kPlain;

    const float query_share = 1.f / min(kBlock, p.seq_q - block * kBlock);
    float* g_scores = p.scores + (head_row * p.q_blocks + block) * p.seq_kv;
    clear(r_out);
    for (int tile = 0; tile < p.kv_blocks; ++tile) {
      wait_full();
      if (!item.has_tile(group, tile)) {
        release();
        wait_full();
        release();
        continue;
      }
      score(tile, kind);
      float columns[kBlock / 4];
      compute_probabilities(r_s, p.scale_log2, lse, p_pairs, columns);

      wait_full();
      const auto r_v = value_mma.get_slice(thread).partition_fragment_B(
          make_tensor(make_smem_ptr(shared.tiles[ring.slot]), ColumnsByRows<kColumns>{}));
      warpgroup_fence_operand(r_p);
      warpgroup_fence_operand(r_out);
      warpgroup_arrive();
      multiply_add(value_mma, r_p, r_v, r_out);
      warpgroup_commit_batch();

      write_scores(columns, shared.column_sums[group][tile % 2], g_scores + tile * kBlock, p.seq_kv - tile * kBlock,
                   query_share, group, thread);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_out);
      release();
    }

    if (item.is_shared && !join_outputs(shared.partial_out, r_out, group, thread)) continue;
    // The previous item's store has been waited for, so the staging memory is free.
    store_block<kColumns>(&out_map, shared.out[group], item.head, block * kBlock, item.batch, r_out, thread);
  }
  if (thread == 0) tma_store_wait_read();
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    coarse_attn_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                           const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kColumns>*>(shared_bytes);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SharedStorage<kColumns>::kSlots; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kGroups * kWarpsPerWarpgroup);
    }
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(&shared.queries_full[i], 1);
      barrier_init(&shared.queries_empty[i], kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup < kGroups) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute<kColumns>(shared, p, out_map, warpgroup, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    if (thread == 0) copy<kColumns>(shared, p, q_map, k_map, v_map);
  }
}

}  // namespace dsa::coarse_attn_fwd
