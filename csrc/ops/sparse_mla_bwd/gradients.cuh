// The gradient warpgroups: gathering keys, dQ, and their share of dkv.
#pragma once

#include <climits>

#include "key_gradients.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/tma.cuh"

namespace dsa::sparse_mla_bwd {

template <Config kC, bool kBack, class Sum>
__device__ __forceinline__ void accumulate(SharedStorage<kC>& shared, const Params& p, const CUtensorMap& dq_map,
                                           int thread) {
  using namespace cute;
  constexpr int kFirst = kBack ? kHalfChunks : 0, kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  constexpr bool kTail = !kBack && has_tail(kC);  // of dQ and of the gather; the back warpgroup has the tail of dkv
  uint64_t* const full = kBack ? &shared.back_full : &shared.front_full;
  const auto chunk = [&](Bf16* first, int i) { return SharedStorage<kC>::chunk(first, i); };

  ValueMma dq_mma;
  NarrowColumnsMma tail_mma;
  Tensor s_ds = make_tensor(make_smem_ptr(shared.dscores), RowsByColumns<kBlockK>{});
  Tensor s_k = make_tensor(make_smem_ptr(chunk(shared.keys, kFirst)), ColumnsByRows<kHalfChunks * kChunkColumns>{});
  Tensor s_k_tail =
      make_tensor(make_smem_ptr(chunk(shared.keys, kTail ? kTailChunk : 0)), ColumnsByRows<kChunkColumns>{});
  Tensor r_ds = dq_mma.get_slice(thread).partition_fragment_A(s_ds);
  Tensor r_k = dq_mma.get_slice(thread).partition_fragment_B(s_k);
  Tensor r_ds_tail = tail_mma.get_slice(thread).partition_fragment_A(s_ds);
  Tensor r_k_tail = tail_mma.get_slice(thread).partition_fragment_B(s_k_tail);
  Tensor r_dq = partition_fragment_C(dq_mma, Shape<_64, Int<kHalfChunks * kChunkColumns>>{});
  Tensor r_dq_tail = partition_fragment_C(tail_mma, Shape<_64, Int<kChunkColumns>>{});
  clear(r_dq);
  clear(r_dq_tail);
  dq_mma.accumulate_ = GMMA::ScaleOut::One;
  tail_mma.accumulate_ = GMMA::ScaleOut::One;

  int (&ids)[kIdSlots][kBlockK] = shared.ids[kBack];
  const auto next_id = [&](int j) {  // of slot `thread` of the j-th tile, -1 where it is not visible
    const int slot = j * kBlockK + thread % kBlockK;
    const int id = slot < shared.place.slots ? __ldg(shared.place.g_ids + slot) : -1;
    return is_visible(id, shared.place.id_end) ? id : -1;
  };
  const auto feed = [&](int j) {
    const uint32_t s_piece =
        shared_address(chunk(shared.keys, kFirst)) + swizzled_offset(gather_row(thread), gather_piece(thread));
    int row_ids[kGatherRowsPerThread];
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i)
      row_ids[i] = ids[j % kIdSlots][gather_row(thread) + i * kGatherRowStep];
    const GatherRows rows(shared.place.g_keys + gather_piece(thread) * 16,
                          static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), row_ids, INT_MAX);
    rows.template copy<kFirst, kFirst, kFirst + kHalfChunks>(s_piece);
    if constexpr (kTail) rows.template copy<kFirst, kTailChunk, kTailChunk + 1>(s_piece);
    if constexpr (!kBack) publish_visible(shared.visible[j % 2], rows, thread);
    arrive(full);
    arrive_after_copies(full);
  };

  const bool empty = shared.place.tiles == 0;
  if (!empty) {
    if (thread < kBlockK) ids[0][thread] = next_id(0);
    sync_warpgroup<kBarrier>();
    feed(0);
  }
  wait(&shared.inputs_full, 0);
  bool last = empty;
#pragma unroll 1
  for (int j = 0; !last; ++j) {
    const uint32_t parity = j % 2;
    last = j + 1 == shared.place.tiles;
    const int id_of_next = last ? -1 : next_id(j + 1);
    wait(&shared.probs_written, parity);
    const bool skip = !any_visible(shared.visible[parity]);
    if (!skip) {
      // dQ += dS K
      fence_async_proxy();
      warpgroup_fence_operand(r_dq);
      if constexpr (kTail) warpgroup_fence_operand(r_dq_tail);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < size<2>(r_ds); ++k) gemm(dq_mma, r_ds(_, _, k), r_k(_, _, k), r_dq);
      if constexpr (kTail) {
#pragma unroll
        for (int k = 0; k < size<2>(r_ds); ++k) gemm(tail_mma, r_ds_tail(_, _, k), r_k_tail(_, _, k), r_dq_tail);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dq);
      if constexpr (kTail) warpgroup_fence_operand(r_dq_tail);
    }
    if (thread < kBlockK) ids[(j + 1) % kIdSlots][thread] = id_of_next;
    if (!kBack && p.prefetch_sums && thread < kBlockK && id_of_next >= 0) {
      const Sum* g_sums = static_cast<const Sum*>(p.dkv_sum) + shared.place.first_sum;
      prefetch_to_l2(g_sums + int64_t{id_of_next} * (p.groups * kC.d_qk), kC.d_qk * sizeof(Sum));
    }
    sync_warpgroup<kBarrier>();
    if (!last) feed(j + 1);
    if (!skip) {
      add_key_gradients<kC, kBack ? kBackRole : kFrontRole, Sum>(shared, p, ids[j % kIdSlots], thread);
    } else {
      arrive(&shared.probs_read);
    }
  }

  if (!kBack && thread == 0 && p.finished != nullptr) atomicAdd(p.finished, 1);
  // dQ leaves in place of Q, once all warpgroups have read it.
  if (!empty) wait(&shared.probs_read, (shared.place.tiles - 1) % 2);
  if constexpr (sizeof(Sum) != sizeof(float)) {  // dS counted in units of the sums
    const float unit = 1.f / shared.place.sum_scale;
#pragma unroll
    for (int i = 0; i < size(r_dq); ++i) r_dq(i) *= unit;
#pragma unroll
    for (int i = 0; i < size(r_dq_tail); ++i) r_dq_tail(i) *= unit;
  }
  store_accumulators<kHalfChunks * kChunkColumns>(shared_address(chunk(shared.q, kFirst)), r_dq, thread);
  if constexpr (kTail)
    store_accumulators<kChunkColumns>(shared_address(chunk(shared.q, kTailChunk)), r_dq_tail, thread);
  fence_async_proxy();
  sync_warpgroup<kBarrier>();
  if (thread == 0) {
    const Item item(p, blockIdx.x);
    const auto store = [&](int c) {
      tma_store(&dq_map, chunk(shared.q, c),
                {c * kChunkColumns, item.head_block * kBlockHeads, item.group, item.s, item.b});
    };
#pragma unroll 1
    for (int c = kFirst; c < kFirst + kHalfChunks; ++c) store(c);
    if (kTail) store(kTailChunk);
    tma_store_commit();
    tma_store_wait_read();
  }
}

}  // namespace dsa::sparse_mla_bwd
