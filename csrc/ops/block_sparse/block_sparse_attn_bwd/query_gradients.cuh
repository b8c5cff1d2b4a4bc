// dq of a block of queries: dq += dS K over the blocks of keys that it lists, from the tiles of dS.
#pragma once

#include "stream.cuh"

namespace dsa::block_sparse_attn_bwd {

// One item. The present slot is its first.
template <int kColumns, class SlotWalk>
__device__ __forceinline__ void compute_queries(Stream<kColumns>& shared, SlotWalk& walk, const Params& p,
                                                const Maps& maps, int thread) {
  using namespace cute;
  TransposedMma<kColumns> mma;
  Tensor r_dq = partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});
  clear(r_dq);
  mma.accumulate_ = GMMA::ScaleOut::One;
  for (;;) {
    auto& slot = shared.slots[walk.slot];
    if (shared.headers[walk.slot].kind == kEnd) break;
    const int keys = shared.headers[walk.slot].value;
    if (keys < kBlock) {  // rows of invalid keys hold anything
      clear_rows<kColumns>(slot.rows, keys, kBlock, thread);
      clear_rows<kBlock>(slot.factors, keys, kBlock, thread);
      sync_warpgroup(own_barrier());
    }
    const auto slice = mma.get_slice(thread);
    const auto r_ds = slice.partition_fragment_A(make_tensor(make_smem_ptr(slot.factors), ColumnsByRows<kBlock>{}));
    const auto r_keys = slice.partition_fragment_B(make_tensor(make_smem_ptr(slot.rows), ColumnsByRows<kColumns>{}));
    warpgroup_fence_operand(r_dq);
    warpgroup_arrive();
    multiply_add(mma, r_ds, r_keys, r_dq);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_dq);
    arrive(&shared.empty[walk.slot]);
    walk.advance();
    wait(&shared.full[walk.slot], walk.parity());
  }
  const Header& end = shared.headers[walk.slot];
#pragma unroll
  for (int i = 0; i < r_dq.size(); ++i) r_dq(i) *= p.sm_scale;
  Bf16* s_dq = shared.slots[walk.slot].rows;
  const int row = thread / kWarpThreads * 16 + thread % 16, piece = thread / 16 % 2;
  store_accumulators<kColumns>(shared_address(s_dq), r_dq, stored_query(row), piece);
  store_tile<kColumns>(&maps.dq, s_dq, end.head, end.position, end.batch, thread);
  if (thread == 0) {
    count_done(p.queries_done(end.unit));  // the item's tiles have all arrived
    tma_store_wait_read();
  }
  arrive(&shared.empty[walk.slot]);
  walk.end_item();
}

}  // namespace dsa::block_sparse_attn_bwd
