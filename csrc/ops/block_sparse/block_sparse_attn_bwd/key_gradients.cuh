// dk and dv by blocks of keys: dv += P^T dout, dk += dS^T q over the query blocks that list them, for each head of the
// group in turn (roles: streams.cuh). A stream holds its keys and values. Through its ring pass queries, dout and the
// rows' bases and delta, then an end marker (mark), whose tiles stage dk and dv on their way to global memory.
#pragma once

#include "sm90/math.cuh"
#include "sm90/registers.cuh"
#include "streams.cuh"

namespace dsa::block_sparse_attn_bwd {

template <int kColumns>
struct KeyStream {
  static constexpr int kSlots = 2 * 128 / kColumns;

  struct Slot {
    alignas(1024) Tile<kColumns> q, dout;
  };

  alignas(1024) Tile<kColumns> k, v;
  Slot slots[kSlots];
  alignas(16) float bases[kSlots][2][kBlock];  // bases, and delta
  int item, queries, keys;  // block of keys, number of query blocks, number of valid keys; item is -1 at the end
  uint64_t item_full, item_empty, full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init() {
    barrier_init(&item_full, 1), barrier_init(&item_empty, kWarpgroupThreads);
    for (int i = 0; i < kSlots; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarpgroupThreads);
  }
};

struct KeyMaps {
  CUtensorMap q, dout, k, v, dk, dv;
};

template <int kColumns>
__device__ __forceinline__ void copy_for_keys(KeyStream<kColumns>& shared, const Params& p, const KeyMaps& maps,
                                              int lane) {
  constexpr int kTileBytes = sizeof(Tile<kColumns>), kRowBytes = 2 * kBlock * sizeof(float);
  Ring<KeyStream<kColumns>::kSlots> ring;
  for (uint32_t parity = 0;; parity ^= 1) {
    const int index = take(&p.taken[1], lane);
    const bool is_last = index >= p.batch * p.kv_heads * p.kv_blocks;
    const Item item(is_last ? 0 : index, p.kv_blocks, p.kv_heads);
    const int group = p.heads / p.kv_heads;
    const int first_head = item.head * group;
    const int64_t first_list = static_cast<int64_t>(item.batch) * p.heads + first_head;
    const auto offset_of = [&](int i) { return p.offsets + (first_list + i) * (p.kv_blocks + 1) + item.block; };
    int queries = 0;
    for (int i = 0; i < group; ++i) queries += __ldg(offset_of(i) + 1) - __ldg(offset_of(i));

    wait(&shared.item_empty, parity ^ 1);
    if (lane == 0) {
      shared.item = is_last ? -1 : index, shared.queries = queries, shared.keys = valid_keys(p, item.block);
      if (is_last) {
        arrive(&shared.item_full);
      } else {
        arrive_and_expect(&shared.item_full, 2 * kTileBytes);
        copy_block<kColumns>(shared.k, &maps.k, item.head, item.block * kBlock, item.batch, &shared.item_full);
        copy_block<kColumns>(shared.v, &maps.v, item.head, item.block * kBlock, item.batch, &shared.item_full);
      }
    }
    __syncwarp();
    if (is_last) return;
    for (int i = 0; i < group; ++i) {
      const int64_t head_index = first_list + i;
      const int* g_listing = p.listing + head_index * p.q_blocks * p.slots;
      const int end = __ldg(offset_of(i) + 1);
      for (int first = __ldg(offset_of(i)); first < end; first += kWarpThreads) {
        const int block_of_lane = first + lane < end ? __ldg(g_listing + first + lane) : 0;
        for (int from = 0; from < min(kWarpThreads, end - first); ++from) {
          const int block = __shfl_sync(~0u, block_of_lane, from);
          wait(&shared.empty[ring.slot], ring.parity ^ 1);
          if (lane == 0) {
            uint64_t* full = &shared.full[ring.slot];
            auto& slot = shared.slots[ring.slot];
            arrive_and_expect(full, 2 * kTileBytes + kRowBytes);
            copy_block<kColumns>(slot.q, &maps.q, first_head + i, block * kBlock, item.batch, full);
            copy_block<kColumns>(slot.dout, &maps.dout, first_head + i, block * kBlock, item.batch, full);
            bulk_load(shared.bases[ring.slot], p.rows + (head_index * p.q_blocks + block) * 2 * kBlock, kRowBytes,
                      full);
          }
          __syncwarp();
          ring.advance();
        }
      }
    }
    wait(&shared.empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) arrive(&shared.full[ring.slot]);
    __syncwarp();
    ring.advance();
  }
}

template <int kColumns>
__device__ __forceinline__ void compute_keys(KeyStream<kColumns>& shared, const Params& p, const KeyMaps& maps,
                                             int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  ScoreMmaFromShared score_mma;
  RowsMma<kColumns> row_mma;
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_dp = make_fragment_like(r_s);
  Tensor r_p = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _4>{});
  Tensor r_ds = make_fragment_like(r_p);
  Tensor r_dk = partition_fragment_C(row_mma, Shape<_64, Int<kColumns>>{});
  Tensor r_dv = make_fragment_like(r_dk);
  const float scale_log2 = p.sm_scale * kLog2E;
  const auto multiply_rows = [&](auto& a_tile, auto& b_tile, auto& r_product) {
    const auto slice = score_mma.get_slice(thread);
    const auto r_a =
        slice.partition_fragment_A(make_tensor(make_smem_ptr(recomputed(a_tile)), RowsByColumns<kColumns>{}));
    const auto r_b = slice.partition_fragment_B(make_tensor(make_smem_ptr(b_tile), RowsByColumns<kColumns>{}));
    warpgroup_fence_operand(r_product);
    warpgroup_arrive();
    multiply(score_mma, r_a, r_b, r_product);
    warpgroup_commit_batch();
  };
  const auto add_product = [&](auto& r_factors, auto& tile, auto& r_sum) {
    const auto r_rows =
        row_mma.get_slice(thread).partition_fragment_B(make_tensor(make_smem_ptr(tile), ColumnsByRows<kColumns>{}));
    warpgroup_fence_operand(r_factors);
    warpgroup_fence_operand(r_sum);
    warpgroup_arrive();
    multiply_add(row_mma, r_factors, r_rows, r_sum);
    warpgroup_commit_batch();
  };
  Ring<KeyStream<kColumns>::kSlots> ring;
  for (uint32_t parity = 0;; parity ^= 1) {
    wait(&shared.item_full, parity);
    const int index = shared.item, keys = shared.keys;
    if (index < 0) break;
    clear(r_dk);
    clear(r_dv);
    for (int left = shared.queries; left > 0; --left) {
      wait(&shared.full[ring.slot], ring.parity);
      auto& slot = shared.slots[ring.slot];
      // For this lane's columns, eight apart.
      const auto* bases = reinterpret_cast<const float2*>(shared.bases[ring.slot][0]) + lane % 4;
      const auto* delta = reinterpret_cast<const float2*>(shared.bases[ring.slot][1]) + lane % 4;
      multiply_rows(shared.k, slot.q, r_s);
      multiply_rows(shared.v, slot.dout, r_dp);
      warpgroup_wait<1>();
      warpgroup_fence_operand(r_s);
#pragma unroll
      for (int i = 0; i < r_s.size(); i += 4) {
        const float2 base_pair = bases[i];
#pragma unroll
        for (int j = i; j < i + 4; ++j) {
          const float base = j % 2 ? base_pair.y : base_pair.x;
          r_s(j) = base == kMissingBase ? 0.f : exp2_fast(fmaf(r_s(j), scale_log2, base));
        }
      }
      to_operand(r_s, r_p);
      add_product(r_p, slot.dout, r_dv);
      warpgroup_wait<1>();
      warpgroup_fence_operand(r_dp);
#pragma unroll
      for (int i = 0; i < r_s.size(); i += 4) {
        const float2 delta_pair = delta[i];
#pragma unroll
        for (int j = i; j < i + 4; ++j) r_s(j) *= r_dp(j) - (j % 2 ? delta_pair.y : delta_pair.x);
      }
      to_operand(r_s, r_ds);
      add_product(r_ds, slot.q, r_dk);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dv);
      warpgroup_fence_operand(r_dk);
      arrive(&shared.empty[ring.slot]);
      ring.advance();
    }
    arrive(&shared.item_empty);
    const Item item(index, p.kv_blocks, p.kv_heads);
    const int position = item.block * kBlock;
#pragma unroll
    for (int i = 0; i < r_dk.size(); ++i) r_dk(i) *= p.sm_scale;
    // Rows of invalid keys hold arbitrary products.
    if (keys < kBlock) {
      const int left = keys - (warp * 16 + lane / 4);
#pragma unroll
      for (int i = 0; i < r_dk.size(); ++i) {
        if (i / 2 % 2 * 8 >= left) r_dk(i) = r_dv(i) = 0.f;
      }
    }
    wait(&shared.full[ring.slot], ring.parity);
    auto& mark = shared.slots[ring.slot];
    store_block<kColumns>(&maps.dk, mark.q, item.head, position, item.batch, r_dk, thread);
    store_block<kColumns>(&maps.dv, mark.dout, item.head, position, item.batch, r_dv, thread);
    if (thread == 0) tma_store_wait_read();
    arrive(&shared.empty[ring.slot]);
    ring.advance();
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    key_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ KeyMaps maps) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& streams = *reinterpret_cast<KeyStream<kColumns>(*)[kStreams]>(shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& stream : streams) stream.init();
    fence_barrier_init();
  }
  __syncthreads();
  run_roles(
      streams, [&](auto& stream, int thread) { compute_keys<kColumns>(stream, p, maps, thread); },
      [&](auto& stream, int lane) { copy_for_keys<kColumns>(stream, p, maps, lane); });
}

}  // namespace dsa::block_sparse_attn_bwd
