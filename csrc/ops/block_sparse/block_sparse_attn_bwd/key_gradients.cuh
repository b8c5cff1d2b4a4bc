// dk and dv of a block of keys: dv += P^T dout, dk += dS^T q over the query blocks that list it, for each head of the
// group in turn; and the tiles of dS for the gradients of queries.
#pragma once

#include "prepare.cuh"
#include "sm90/math.cuh"
#include "sm90/registers.cuh"
#include "stream.cuh"

namespace dsa::block_sparse_attn_bwd {

// Converts a 64 x 64 accumulator fragment to an A operand of the next product.
template <class Scores, class Fragment>
__device__ __forceinline__ void to_operand(const Scores& r_s, Fragment& r_operand) {
  auto& pairs = *reinterpret_cast<uint32_t (*)[sizeof(r_s) / 8]>(r_operand.data());
#pragma unroll
  for (int i = 0; i < r_s.size() / 2; ++i) pairs[i] = pack_bf16(r_s(2 * i), r_s(2 * i + 1));
}

// Calls use(g_values, i) for each four values of dk and dv, from value i on, with their place among the sums of a
// block.
template <class Sums, class Use>
__device__ __forceinline__ void for_sums(float* g_sums, int block, const Sums& r_sums, int which, int thread,
                                         const Use& use) {
  auto* g_block =
      reinterpret_cast<float4*>(g_sums) + (block * 2 + which) * int64_t{r_sums.size() / 4} * kWarpgroupThreads;
#pragma unroll
  for (int i = 0; i < r_sums.size(); i += 4) use(g_block + i / 4 * kWarpgroupThreads + thread, i);
}

// The sums of the parts of a head before this one, stored by another SM while this kernel runs.
template <class Sums>
__device__ __forceinline__ void load_sums(float* g_sums, int block, Sums& r_sums, int which, int thread) {
  for_sums(g_sums, block, r_sums, which, thread, [&](const float4* g_values, int i) {
    const float4 values = __ldcg(g_values);
    r_sums(i) = values.x, r_sums(i + 1) = values.y, r_sums(i + 2) = values.z, r_sums(i + 3) = values.w;
  });
}

template <class Sums>
__device__ __forceinline__ void store_sums(float* g_sums, int block, const Sums& r_sums, int which, int thread) {
  for_sums(g_sums, block, r_sums, which, thread, [&](float4* g_values, int i) {
    __stcg(g_values, make_float4(r_sums(i), r_sums(i + 1), r_sums(i + 2), r_sums(i + 3)));
  });
}

// One item. Its keys and values are in the present slot.
template <int kColumns, class SlotWalk>
__device__ __forceinline__ void compute_keys(Stream<kColumns>& shared, SlotWalk& walk, const Params& p,
                                             const Maps& maps, int thread) {
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
  const int continued = shared.headers[walk.slot].value;
  if (continued >= 0) {
    load_sums(p.sums, continued, r_dk, 0, thread);
    load_sums(p.sums, continued, r_dv, 1, thread);
  } else {
    clear(r_dk);
    clear(r_dv);
  }
  auto& held = shared.slots[walk.slot];
  walk.hold();
  for (;;) {
    wait(&shared.full[walk.slot], walk.parity());
    if (shared.headers[walk.slot].kind == kEnd) break;
    auto& slot = shared.slots[walk.slot];
    // For this lane's columns, eight apart.
    const auto* bases = reinterpret_cast<const float2*>(shared.bases[walk.slot][0]) + lane % 4;
    const auto* delta = reinterpret_cast<const float2*>(shared.bases[walk.slot][1]) + lane % 4;
    multiply_rows(held.rows, slot.rows, r_s);
    multiply_rows(held.factors, slot.factors, r_dp);
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
    add_product(r_p, slot.factors, r_dv);
    warpgroup_wait<1>();
    warpgroup_fence_operand(r_dp);
#pragma unroll
    for (int i = 0; i < r_s.size(); i += 4) {
      const float2 delta_pair = delta[i];
#pragma unroll
      for (int j = i; j < i + 4; ++j) r_s(j) *= r_dp(j) - (j % 2 ? delta_pair.y : delta_pair.x);
    }
    to_operand(r_s, r_ds);
    char* g_tile = p.gradients + static_cast<int64_t>(shared.headers[walk.slot].value) * kPairBytes;
    store_score_gradients(g_tile, r_ds, recomputed(thread));
    add_product(r_ds, slot.rows, r_dk);
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_dv);
    warpgroup_fence_operand(r_dk);
    arrive(&shared.empty[walk.slot]);
    walk.advance();
  }
  arrive(&shared.empty[walk.held()]);
  const Header& end = shared.headers[walk.slot];
  const int unit = end.unit, keys = end.keys, head = end.head, position = end.position, batch = end.batch;
  const int summed_block = end.block;
  if (end.value) {
    store_sums(p.sums, summed_block, r_dk, 0, thread);
    store_sums(p.sums, summed_block, r_dv, 1, thread);
  } else {
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
    auto& stage = shared.slots[walk.slot];
    store_block<kColumns>(&maps.dk, stage.rows, head, position, batch, r_dk, thread);
    store_block<kColumns>(&maps.dv, stage.factors, head, position, batch, r_dv, thread);
  }
  fence_async_proxy_global();  // tiles of dS are read by bulk copies
  sync_warpgroup(own_barrier());
  if (thread == 0) {
    if (summed_block >= 0) set_done(p.units_summed(summed_block), unit + 1);
    count_done(p.keys_done(unit));
    tma_store_wait_read();
  }
  arrive(&shared.empty[walk.slot]);
  walk.end_item();
}

}  // namespace dsa::block_sparse_attn_bwd
