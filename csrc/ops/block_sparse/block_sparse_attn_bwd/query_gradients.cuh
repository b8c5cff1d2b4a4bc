// dq by blocks of queries: dS = P (dout V^T - delta), dq += dS K; also the base and delta of each row for the other
// kernel (roles: streams.cuh). Through a stream's ring pass a block of queries, of dout and of out, then keys and
// values of each listed block in turn, then an end marker (mark), whose tile stages dq on its way to global memory.
#pragma once

#include "sm90/math.cuh"
#include "sm90/registers.cuh"
#include "streams.cuh"
#include "tiles/softmax.cuh"

namespace dsa::block_sparse_attn_bwd {

template <int kColumns>
struct QueryStream {
  static constexpr int kSlots = 7 * 128 / kColumns;

  alignas(1024) Tile<kColumns> tiles[kSlots];
  int keys[kSlots];   // valid keys of the block; 0 at an end marker
  int items[kSlots];  // of a block of queries: its index
  uint64_t full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kSlots; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarpgroupThreads);
  }
};

struct QueryMaps {
  CUtensorMap q, dout, out, k, v, dq;
};

template <int kColumns>
__device__ __forceinline__ void copy_for_queries(QueryStream<kColumns>& shared, const Params& p, const QueryMaps& maps,
                                                 int lane) {
  Ring<QueryStream<kColumns>::kSlots> ring;
  const auto send = [&](const CUtensorMap& map, int keys, int index, int head, int position, int batch) {
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) {
      shared.keys[ring.slot] = keys, shared.items[ring.slot] = index;
      load_block<kColumns>(shared.tiles[ring.slot], &map, head, position, batch, &shared.full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
  };
  const auto mark = [&] {
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) {
      shared.keys[ring.slot] = 0;
      arrive(&shared.full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
  };
  mark();  // as if a list had ended
  for (;;) {
    const int index = take(&p.taken[0], lane);
    if (index >= p.batch * p.heads * p.q_blocks) break;
    const Item item(index, p.q_blocks, p.heads);
    const int kv_head = item.head / (p.heads / p.kv_heads);
    for (const CUtensorMap* map : {&maps.q, &maps.dout, &maps.out}) {
      send(*map, kBlock, index, item.head, item.block * kBlock, item.batch);
    }
    const List list = listed_blocks(p, item);
    for (int first = 0; first < list.count; first += kWarpThreads) {
      const int id = first + lane < list.count ? __ldg(list.g_ids + first + lane) : -1, keys = valid_keys(p, id);
      for (unsigned left = __ballot_sync(~0u, keys > 0); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int position = __shfl_sync(~0u, id, from) * kBlock, valid = __shfl_sync(~0u, keys, from);
        send(maps.k, valid, index, kv_head, position, item.batch);
        send(maps.v, valid, index, kv_head, position, item.batch);
      }
    }
    mark();
  }
  mark();
}

// delta: the dot products of the rows of O and dO, over the four lanes of each row.
template <int kColumns, class Rows>
__device__ __forceinline__ void add_row_products(const Bf16* s_out, Rows& r_dout, float (&delta)[2], int thread) {
  for_operand_pairs<kColumns>(s_out, thread, [&](int i, const uint32_t (&pairs)[4]) {
    for (int j = 0; j < 4; ++j) delta[j % 2] += dot_bf16(pairs[j], pairs_of(r_dout)[i][j]);
  });
  for (float& sum : delta) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
}

// What the two rows of a lane need: delta less dlse, and the base of the probabilities; also written for the keys.
__device__ __forceinline__ void finish_rows(const Params& p, const Item& item, int index, int thread, float (&delta)[2],
                                            float (&bases)[2]) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = item.block * kBlock + row + 8 * r;
    const bool exists = query < p.seq_q;
    if (exists && p.dlse != nullptr) delta[r] -= __ldg(p.dlse + item.row(p) + query);
    bases[r] = exists ? base_of_lse(__ldg(p.lse + item.row(p) + query)) : kMissingBase;  // an lse of -inf makes P 0
    if (lane % 4 == 0) {
      float* g_rows = p.rows + static_cast<int64_t>(index) * 2 * kBlock + row + 8 * r;
      g_rows[0] = bases[r], g_rows[kBlock] = delta[r];
    }
  }
}

// S to P.
template <class Scores>
__device__ __forceinline__ void take_probabilities(Scores& r_s, float scale_log2, const float (&bases)[2]) {
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, bases[i / 2 % 2]));
}

// P to dS, before the scale.
template <class Scores>
__device__ __forceinline__ void take_score_gradients(Scores& r_s, const Scores& r_dp, const float (&delta)[2]) {
#pragma unroll
  for (int i = 0; i < r_s.size(); ++i) r_s(i) *= r_dp(i) - delta[i / 2 % 2];
}

template <int kColumns>
__device__ __forceinline__ void compute_queries(QueryStream<kColumns>& shared, const Params& p, const QueryMaps& maps,
                                                int thread) {
  using namespace cute;
  constexpr int kSlots = QueryStream<kColumns>::kSlots;
  ScoreMmaFromRegisters score_mma;
  RowsMma<kColumns> key_mma;
  RowsOperand<kColumns> r_q, r_dout;
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_dp = make_fragment_like(r_s);
  Tensor r_ds = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _4>{});
  Tensor r_dq = partition_fragment_C(key_mma, Shape<_64, Int<kColumns>>{});
  const float scale_log2 = p.sm_scale * kLog2E;

  Ring<kSlots> ring;
  const auto wait_full = [&] { wait(&shared.full[ring.slot], ring.parity); };
  const auto load_operand = [&](auto& r_rows) {
    for_operand_pairs<kColumns>(shared.tiles[ring.slot], thread, [&](int i, const uint32_t (&pairs)[4]) {
      for (int j = 0; j < 4; ++j) pairs_of(r_rows)[i][j] = pairs[j];
    });
  };
  const auto multiply_rows = [&](const auto& r_rows, auto& r_product) {
    const auto r_tile = score_mma.get_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.tiles[ring.slot]), RowsByColumns<kColumns>{}));
    warpgroup_fence_operand(r_product);
    warpgroup_arrive();
    multiply(score_mma, r_rows, r_tile, r_product);
    warpgroup_commit_batch();
  };
  wait_full();
  ring.advance();  // blocks of queries always follow an end marker
  for (;;) {
    wait_full();
    if (shared.keys[ring.slot] == 0) break;  // no further block of queries
    const int index = shared.items[ring.slot];
    const int first_slot = ring.slot;
    load_operand(r_q);
    if (thread == 0) tma_store_wait_read();
    arrive(&shared.empty[(first_slot + kSlots - 1) % kSlots]);  // the end marker, whose tile the last dq has left
    ring.advance();
    wait_full();
    load_operand(r_dout);
    ring.advance();
    wait_full();
    float delta[2] = {}, bases[2];
    add_row_products<kColumns>(shared.tiles[ring.slot], r_dout, delta, thread);
    ring.advance();
    // The slots of q, dout and out are released after a product has waited for the loads: ptxas may move an arrival
    // ahead of loads that are not complete.
    bool releases_queries = true;
    const auto release_queries = [&] {
      for (int i = 0; i < 3; ++i) arrive(&shared.empty[(first_slot + i) % kSlots]);
      releases_queries = false;
    };
    const Item item(index, p.q_blocks, p.heads);
    finish_rows(p, item, index, thread, delta, bases);
    warpgroup_fence_operand(r_q);
    warpgroup_fence_operand(r_dout);

    clear(r_dq);
    for (;;) {
      wait_full();
      const int keys = shared.keys[ring.slot], key_slot = ring.slot;
      if (keys == 0) break;
      multiply_rows(r_q, r_s);
      ring.advance();
      wait_full();
      multiply_rows(r_dout, r_dp);
      warpgroup_wait<1>();
      warpgroup_fence_operand(r_s);
      take_probabilities(r_s, scale_log2, bases);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dp);
      arrive(&shared.empty[ring.slot]);
      ring.advance();
      if (releases_queries) release_queries();
      take_score_gradients(r_s, r_dp, delta);
      if (keys < kBlock) {
        for_columns_from(keys, r_s, recomputed(thread), [&](int i) { r_s(i) = 0.f; });
        clear_rows<kColumns>(shared.tiles[key_slot], keys, kBlock, thread);
        sync_warpgroup(own_barrier());
      }
      to_operand(r_s, r_ds);
      const auto r_keys = key_mma.get_slice(thread).partition_fragment_B(
          make_tensor(make_smem_ptr(shared.tiles[key_slot]), ColumnsByRows<kColumns>{}));
      warpgroup_fence_operand(r_ds);
      warpgroup_fence_operand(r_dq);
      warpgroup_arrive();
      multiply_add(key_mma, r_ds, r_keys, r_dq);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dq);
      arrive(&shared.empty[key_slot]);
    }
    if (releases_queries) release_queries();
    use_operand(r_q);
    use_operand(r_dout);
#pragma unroll
    for (int i = 0; i < r_dq.size(); ++i) r_dq(i) *= p.sm_scale;
    store_block<kColumns>(&maps.dq, shared.tiles[ring.slot], item.head, item.block * kBlock, item.batch, r_dq, thread);
    ring.advance();
  }
  if (thread == 0) tma_store_wait_read();
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ QueryMaps maps) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& streams = *reinterpret_cast<QueryStream<kColumns>(*)[kStreams]>(shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& stream : streams) stream.init();
    fence_barrier_init();
  }
  __syncthreads();
  run_roles(
      streams, [&](auto& stream, int thread) { compute_queries<kColumns>(stream, p, maps, thread); },
      [&](auto& stream, int lane) { copy_for_queries<kColumns>(stream, p, maps, lane); });
}

}  // namespace dsa::block_sparse_attn_bwd
