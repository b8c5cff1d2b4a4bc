// dk and dv of a block of 128 keys: dv += P^T dout, dk += dS^T q over the queries that attend to it, for some heads in
// turn; and the tiles of dS for the gradients of queries. Warp specialization:
//
//   role     threads                     registers  does                                     waits on        signals
//   compute  warpgroups 0, 1             240        gradients of 64 keys, dS                 full,           empty,
//                                                                                            held_full       held_empty
//   copy     warp 0 of warpgroup 2       24         loads queries, dout and bits of the mask empty           full
//   copy     warp 1 of warpgroup 2       24         loads keys and values of the next head   held_empty      held_full
//
// The product dS^T q of a tile is under way together with the scores of the next one. The columns of dk with RoPE are
// summed over the heads of the item.
#pragma once

#include "key_copy.cuh"
#include "sm90/math.cuh"
#include "sm90/registers.cuh"
#include "sm90/signs.cuh"
#include "sm90/turns.cuh"
#include "tiles/accumulators.cuh"

namespace dsa::sparse_mha_bwd {

// Which of this thread's 64 x 64 scores [keys, queries] the mask selects.
struct SelectedQueries {
  uint2 words[2];  // of its two keys: bit 8 i + j of a word is column 32 w + 8 i + lane % 4 * 2 + j

  __device__ __forceinline__ SelectedQueries(const uint2* bits, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 of_key = bits[i * 8];
      words[i] = {of_key.x >> lane % 4 * 2, of_key.y >> lane % 4 * 2};
    }
  }
  // Makes those pairs of bf16 zero that are not selected.
  __device__ __forceinline__ void apply(uint32_t (&pairs)[kTileRows / 4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? words[i].x : words[i - 2].y, low = word << 7, high = word << 6;
      uint32_t* first = pairs + i / 2 * 8 + i % 2;
      first[0] &= spread_signs<0xcc88>(low, high);
      first[2] &= spread_signs<0xdd99>(low, high);
      first[4] &= spread_signs<0xeeaa>(low, high);
      first[6] &= spread_signs<0xffbb>(low, high);
    }
  }
};

// One item, by one of the two warpgroups.
__device__ __forceinline__ void compute_keys(KeyStorage& shared, const Params& p, const KeyItem& item, int first_head,
                                             int warpgroup, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  ScoreMmaFromShared score_mma;
  RowsMma<kColumns> dk_mma;
  RowsMma<kValueColumns> dv_mma;
  dk_mma.accumulate_ = dv_mma.accumulate_ = GMMA::ScaleOut::One;
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_factors = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _4>{});  // P^T, then dS^T
  auto& pairs = *reinterpret_cast<uint32_t (*)[sizeof(r_factors) / 4]>(r_factors.data());
  Tensor r_dk = partition_fragment_C(dk_mma, Shape<_64, Int<kColumns>>{});
  Tensor r_dv = partition_fragment_C(dv_mma, Shape<_64, Int<kValueColumns>>{});
  constexpr int kNopeValues = kNope / 2;  // of r_dk: those of columns without RoPE come first
  const float scale_log2 = p.sm_scale * kLog2E;
  auto& held = shared.held[warpgroup];
  // Starts r_s = A B^T.
  const auto multiply_rows = [&](auto& a_tile, auto& b_tile, auto layout) {
    const auto slice = score_mma.get_slice(thread);
    const auto r_a = slice.partition_fragment_A(make_tensor(make_smem_ptr(recomputed(a_tile)), layout));
    const auto r_b = slice.partition_fragment_B(make_tensor(make_smem_ptr(b_tile), layout));
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    multiply(score_mma, r_a, r_b, r_s);
    warpgroup_commit_batch();
  };
  // Starts r_sum += r_factors B.
  const auto add_product = [&](auto& mma, auto& tile, auto& r_sum, auto layout) {
    const auto r_rows = mma.get_slice(thread).partition_fragment_B(make_tensor(make_smem_ptr(tile), layout));
    warpgroup_fence_operand(r_factors);
    warpgroup_fence_operand(r_sum);
    warpgroup_arrive();
    multiply_add(mma, r_factors, r_rows, r_sum);
    warpgroup_commit_batch();
  };
  const int tiles = 2 * count_query_blocks(p, item.batch, item.block, lane);
  Ring<KeyStorage::kSlots> ring;
  // Turns: the products that the other warpgroup starts next run after those that this one has just started.
  const auto take_turn = [&] { sync_threads(kTurnBarrier + warpgroup, kKeyWarpgroups * kWarpgroupThreads); };
  const auto pass_turn = [&] { arrive_threads(kTurnBarrier + 1 - warpgroup, kKeyWarpgroups * kWarpgroupThreads); };
  if (warpgroup == 1) pass_turn();
  const auto start_scores = [&] {
    wait(&shared.full[ring.slot], ring.parity);
    multiply_rows(held.keys, shared.queries[ring.slot].rows, RowsByColumns<kColumns>{});
  };
  // r_s becomes P, as if all pairs were selected.
  const auto exponentiate = [&] {
    const auto* bases = reinterpret_cast<const float2*>(shared.bases[ring.slot][0]) + lane % 4;
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 4) {
      const float2 base = bases[i];  // of this lane's columns, eight apart
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        r_s(j) = exp2_fast(fmaf(r_s(j), scale_log2, j % 2 ? base.y : base.x));
      }
    }
  };
  // r_s = dP becomes dS, with P from r_factors.
  const auto differentiate = [&] {
    const auto* deltas = reinterpret_cast<const float2*>(shared.bases[ring.slot][1]) + lane % 4;
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 4) {
      const float2 delta = deltas[i];
#pragma unroll
      for (int j = i; j < i + 4; j += 2) {
        const float2 p_pair = unpack_bf16(pairs[j / 2]);
        r_s(j) = p_pair.x * (r_s(j) - delta.x);
        r_s(j + 1) = p_pair.y * (r_s(j + 1) - delta.y);
      }
    }
  };
  // Once nothing is under way, r_factors becomes r_s, and 0 where the mask does not select.
  const auto pack = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_s);
    warpgroup_fence_operand(r_factors);
#pragma unroll
    for (int i = 0; i < r_s.size() / 2; ++i) pairs[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
    SelectedQueries(shared.bits[ring.slot] + warpgroup * kTileRows + row, lane).apply(pairs);
  };
  const auto store_values = [&](int head) {
    const int key = item.block * kBlock + warpgroup * kTileRows + row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_row<kValueColumns>(row_of(p.dv, item.batch, key + 8 * r, head), key + 8 * r < p.seq_kv, r_dv, r, lane);
    }
  };
  uint32_t held_parity = 0;
  clear(r_dk);
  for (int head = item.first_head; head < item.end_head; ++head) {
    char* g_chunks = scores_of(p, item.batch, head, first_head) + warpgroup * 2 * kChunkBytes;
    clear(r_dv);
#pragma unroll
    for (int i = 0; i < kNopeValues; ++i) r_dk(i) = 0.f;
    wait(&shared.held_full[warpgroup], held_parity);
    held_parity ^= 1;
    if (tiles > 0) {
      start_scores();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_s);
      exponentiate();
#pragma unroll 1
      for (int left = tiles;;) {
        const int slot = ring.slot;
        auto& queries = shared.queries[slot];
        pack();
        warpgroup_fence_operand(r_dk);
        take_turn();
        multiply_rows(held.values, queries.dout, RowsByColumns<kValueColumns>{});
        add_product(dv_mma, queries.dout, r_dv, ColumnsByRows<kValueColumns>{});
        pass_turn();
        warpgroup_wait<1>();
        warpgroup_fence_operand(r_s);
        differentiate();
        char* g_chunk = g_chunks + int64_t{shared.chunks[slot]} * kChunkBytes;
        pack();
        warpgroup_fence_operand(r_dv);
        ring.advance();
        take_turn();
        if (--left == 0) {
          arrive_as_warp(&shared.held_empty[warpgroup], lane);
          add_product(dk_mma, queries.rows, r_dk, ColumnsByRows<kColumns>{});
          pass_turn();
          store_chunk(g_chunk, r_factors, recomputed(thread));
          store_values(head);
          warpgroup_wait<0>();
          warpgroup_fence_operand(r_dk);
          arrive_as_warp(&shared.empty[slot], lane);
          break;
        }
        start_scores();
        add_product(dk_mma, queries.rows, r_dk, ColumnsByRows<kColumns>{});
        pass_turn();
        store_chunk(g_chunk, r_factors, recomputed(thread));
        warpgroup_wait<1>();
        warpgroup_fence_operand(r_s);
        exponentiate();
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_dk);
        arrive_as_warp(&shared.empty[slot], lane);
      }
    } else {
      arrive_as_warp(&shared.held_empty[warpgroup], lane);
      store_values(head);
    }
    const int key = item.block * kBlock + warpgroup * kTileRows + row;
#pragma unroll
    for (int i = 0; i < kNopeValues; ++i) r_dk(i) *= p.sm_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_row<kNope>(row_of(p.dk, item.batch, key + 8 * r, head), key + 8 * r < p.seq_kv, r_dk, r, lane);
    }
  }
  const int part = item.first_head / p.heads_together, key = item.block * kBlock + warpgroup * kTileRows + row;
  float* g_part = p.dk_rope_parts + (int64_t{part} * p.batch + item.batch) * p.seq_kv * kRope;
#pragma unroll
  for (int i = kNopeValues; i < r_dk.size(); i += 2) {
    const int own = key + i / 2 % 2 * 8, column = column_of_value(i - kNopeValues, lane);
    if (own >= p.seq_kv) continue;
    *reinterpret_cast<float2*>(g_part + int64_t{own} * kRope + column) = {r_dk(i), r_dk(i + 1)};
  }
}

// Heads [first_head, end_head), those whose dS are stored at the same time.
__global__ void __launch_bounds__(kKeyThreads, 1)
    key_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                         const __grid_constant__ int first_head, const __grid_constant__ int end_head) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<KeyStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.init();
    fence_barrier_init();
    for (const CUtensorMap* map : {&maps.q, &maps.dout, &maps.k, &maps.k_rope, &maps.v}) prefetch_tensor_map(map);
  }
  __syncthreads();
  const KeyItem item(p, first_head, end_head);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup < kKeyWarpgroups) {
    set_registers<kKeyRegisters, kStartRegisters>();
    compute_keys(shared, p, item, first_head, warpgroup, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0);
    if (warp == 0) copy_queries(shared, p, maps, item, thread % kWarpThreads);
    if (warp == 1 && thread % kWarpThreads == 0) copy_keys(shared, maps, item);
    if (warp == 2 && thread % kWarpThreads == 0) start_next_kernel();
  }
}

}  // namespace dsa::sparse_mha_bwd
