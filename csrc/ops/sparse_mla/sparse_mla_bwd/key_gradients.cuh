// Each warpgroup's columns of dkv.
#pragma once

#include "storage.cuh"
#include "tiles/scatter.cuh"

namespace dsa::sparse_mla_bwd {

// dkv += P^T dO + dS^T Q for tile j and the columns of one role. Arrives on probs_read once P and dS have been read.
template <Config kC, int kRole, bool kDeterministic>
__device__ __forceinline__ void add_key_gradients(SharedStorage<kC>& shared, const Params& p, int j, int thread) {
  using namespace cute;
  constexpr KeyColumns kShare = kC.key_columns[kRole];
  constexpr int kValueSteps = (kShare.end - kShare.begin) / kShare.step;
  constexpr int kSteps = kValueSteps + (kRole == kFrontRole ? (kC.d_qk - kC.d_v) / kShare.step : 0);
  const int lane = thread % kWarpThreads;

  TransposedMma<kShare.step> mma;
  Tensor s_p = make_tensor(make_smem_ptr(shared.probs), ColumnsByRows<kBlockK>{});
  Tensor s_ds = make_tensor(make_smem_ptr(shared.dscores), ColumnsByRows<kBlockK>{});
  Tensor r_p = mma.get_slice(thread).partition_fragment_A(s_p);
  Tensor r_ds = mma.get_slice(thread).partition_fragment_A(s_ds);
  Tensor r_dkv = partition_fragment_C(mma, Shape<_64, Int<kShare.step>>{});

  const int* warp_ids = shared.ids[kRole == kBackRole][j % kIdSlots] + thread / kWarpThreads * 16;
  float* g_sums = shared.place.g_sums;
  Bf16* g_rows = shared.place.g_rows + (j * kBlockK + thread / kWarpThreads * 16) * kC.d_qk;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int column = i < kValueSteps ? kShare.begin + i * kShare.step : kC.d_v + (i - kValueSteps) * kShare.step;
    const auto columns_of = [&](Bf16* first) {  // [kShare.step, 64 heads] of a row of chunks
      Tensor s_chunk =
          make_tensor(make_smem_ptr(shared.chunk(first, column / kChunkColumns)), ColumnsByRows<kChunkColumns>{});
      Tensor r_chunk = TransposedMma<kChunkColumns>{}.get_slice(thread).partition_fragment_B(s_chunk);
      return make_tensor(r_chunk.data() + column % kChunkColumns * sizeof(Bf16) / 16, r_chunk.layout());
    };
    Tensor r_q = columns_of(shared.q);
    warpgroup_fence_operand(r_dkv);
    warpgroup_arrive();
    multiply(mma, r_ds, r_q, r_dkv);
    if (column < kC.d_v) {
      Tensor r_do = columns_of(shared.dout);
      multiply_add(mma, r_p, r_do, r_dkv);
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(r_dkv);
    if (i + 1 == kSteps) arrive(&shared.probs_read);
    if constexpr (kDeterministic) {
      store_rows(g_rows + column, kC.d_qk, warp_ids, r_dkv, lane);
    } else {
      const uint32_t row_bytes = p.groups * kC.d_qk * sizeof(float);
      const auto row_of = [&](int i) { return sum_row(g_sums + column, row_bytes, warp_ids, i, lane); };
      add_rows<kShare.step / kScatterColumns>(row_of, r_dkv, lane);
    }
  }
}

}  // namespace dsa::sparse_mla_bwd
