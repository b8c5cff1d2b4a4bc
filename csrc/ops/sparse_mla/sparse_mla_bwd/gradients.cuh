// The gradient warpgroups: gather keys, accumulate dQ, and compute their columns of dkv.
#pragma once

#include <climits>

#include "key_gradients.cuh"
#include "merged.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_bwd {

// dQ of one half of the columns, and the tail: as a part of its sum, or through the shared memory of the last tile and
// by TMA to global memory.
template <Config kC, bool kBack, class Sums, class TailSums>
__device__ __forceinline__ void store_dq(SharedStorage<kC>& shared, const Sums& r_dq, const TailSums& r_dq_tail,
                                         const MapsOf<kC>& maps, int thread) {
  constexpr int kFirst = kBack ? kHalfChunks : 0, kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  constexpr bool kTail = !kBack && has_tail(kC);
  const auto chunk = [&](Bf16* first, int i) { return SharedStorage<kC>::chunk(first, i); };
  if (float* g_part = shared.place.g_dq_part) {
    store_accumulators_to_global(g_part + kFirst * kChunkColumns, kC.d_qk, r_dq, recomputed(thread));
    if constexpr (kTail) store_accumulators_to_global(g_part + kC.d_v, kC.d_qk, r_dq_tail, recomputed(thread));
    return;
  }
  // Into the shared memory of the last tile, and from there by TMA to global memory.
  store_accumulators<kHalfChunks * kChunkColumns>(shared_address(chunk(shared.keys, kFirst)), r_dq, thread);
  if constexpr (kTail)
    store_accumulators<kChunkColumns>(shared_address(chunk(shared.keys, kTailChunk)), r_dq_tail, thread);
  fence_async_proxy();
  sync_warpgroup<kBarrier>();
  if (thread == 0) {
    HeadTile at = shared.place.heads;
    const auto store = [&](int c) {
      at.column = c * kChunkColumns;
      tma_store(&maps.of_item(shared).dq, chunk(shared.keys, c), at);
    };
#pragma unroll 1
    for (int c = kFirst; c < kFirst + kHalfChunks; ++c) store(c);
    if (kTail) store(kTailChunk);
    tma_store_commit();
  }
}

template <Config kC, bool kBack, bool kDeterministic>
__device__ __forceinline__ void accumulate(SharedStorage<kC>& shared, const Params& p, const MapsOf<kC>& maps,
                                           int thread) {
  using namespace cute;
  constexpr int kFirst = kBack ? kHalfChunks : 0, kBarrier = kBack ? kBackBarrier : kFrontBarrier;
  constexpr bool kTail = !kBack && has_tail(kC);
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
  const auto id_of_slot = [&](int tile, int row) {  // -1 if it is not visible; an entry if lists are merged
    tile += shared.place.first_tile;
    if (tile >= shared.place.tiles) tile -= shared.place.tiles;
    const int slot = tile * kBlockK + row;
    const int id = slot < shared.place.slots ? __ldg(shared.place.g_ids + slot) : -1;
    return kC.merged || shared.place.ids.has(id) ? id : -1;
  };
  const auto store_id = [&](int tile, int row, int id) {
    if constexpr (kC.merged) {
      const Entry entry(shared, id);
      id = entry.id;
      if (!kBack) publish_queries(shared.merged.listed[tile % 2], entry.queries, row);
    }
    ids[tile % kIdSlots][row] = id;
  };
  const auto feed = [&](int j) {
    const uint32_t s_piece =
        shared_address(chunk(shared.keys, kFirst)) + swizzled_offset(gather_row(thread), gather_piece(thread));
    int row_ids[kGatherRowsPerThread];
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i)
      row_ids[i] = ids[j % kIdSlots][gather_row(thread) + i * kGatherRowStep];
    const GatherRows rows(shared.place.g_keys + gather_piece(recomputed(thread)) * 16,
                          static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), row_ids, {0, INT_MAX});
    rows.template copy<kFirst, kFirst, kFirst + kHalfChunks>(s_piece);
    if constexpr (kTail) rows.template copy<kFirst, kTailChunk, kTailChunk + 1>(s_piece);
    if constexpr (!kBack) publish_visible(shared.visible[j % 2], rows, thread);
    arrive(full);
    arrive_after_copies(full);
  };

  const auto prefetch_sums = [&](int j) {
    if (kBack || kDeterministic || !p.prefetch_sums || thread >= kBlockK) return;
    const int id = ids[j % kIdSlots][thread];
    if (id >= 0) prefetch_l2(shared.place.g_sums + int64_t{id} * (p.groups * kC.d_qk), kC.d_qk * sizeof(float));
  };
  store_id(thread / kBlockK, thread % kBlockK, id_of_slot(thread / kBlockK, thread % kBlockK));
  sync_warpgroup<kBarrier>();
  feed(0);
  wait(&shared.inputs_full, 0);
  bool last = false;
#pragma unroll 1
  for (int j = 0; !last; ++j) {
    const uint32_t parity = j % 2;
    last = j + 1 == shared.place.tiles;
    wait(&shared.probs_written, parity);
    int later_id;  // loaded here, where no additions are queued before it
    const bool skip = !any_visible(shared.visible[parity]);
    if (!skip) {
      // dQ += dS K
      fence_async_proxy();
      warpgroup_fence_operand(r_dq);
      if constexpr (kTail) warpgroup_fence_operand(r_dq_tail);
      warpgroup_arrive();
      multiply_add(dq_mma, r_ds, r_k, r_dq);
      if constexpr (kTail) {
        multiply_add(tail_mma, r_ds_tail, r_k_tail, r_dq_tail);
      }
      warpgroup_commit_batch();
      later_id = id_of_slot(j + 2, thread % kBlockK);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dq);
      if constexpr (kTail) warpgroup_fence_operand(r_dq_tail);
    } else {
      later_id = id_of_slot(j + 2, thread % kBlockK);
    }
    sync_warpgroup<kBarrier>();
    if (last) {
      store_dq<kC, kBack>(shared, r_dq, r_dq_tail, maps, thread);
    } else {
      feed(j + 1);
    }
    if (thread < kBlockK) store_id(j + 2, thread, later_id);
    prefetch_sums(j + 1);
    if (!skip) {
      add_key_gradients<kC, kBack ? kBackRole : kFrontRole, kDeterministic>(shared, p, j, thread);
    } else {
      arrive(&shared.probs_read);
    }
  }

  if (!kBack && thread == 0 && p.finished != nullptr) atomicAdd(p.finished, 1);
  if (thread == 0) tma_store_wait_read();
}

}  // namespace dsa::sparse_mla_bwd
