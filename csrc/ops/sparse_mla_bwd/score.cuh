// The score warpgroup: P and dS of each tile.
#pragma once

#include "key_gradients.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"

namespace dsa::sparse_mla_bwd {

// sum(dO * O) of one row, in every lane of the quad that holds the row.
template <Config kC>
__device__ __forceinline__ float output_dot(const SharedStorage<kC>& shared, const Bf16* g_out, int row, int lane) {
  constexpr int kPieces = kC.d_v / 8, kQuad = 4, kPiecesOfChunk = kChunkColumns / 8;
  uint4 out[kPieces / kQuad];
#pragma unroll
  for (int i = 0; i < kPieces / kQuad; ++i)
    out[i] = __ldg(reinterpret_cast<const uint4*>(g_out) + kQuad * i + lane % kQuad);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPieces / kQuad; ++i) {
    const int piece = kQuad * i + lane % kQuad;
    const char* chunk = reinterpret_cast<const char*>(shared.dout + piece / kPiecesOfChunk * kChunkElements);
    const uint4 dout = *reinterpret_cast<const uint4*>(chunk + swizzled_offset(row, piece % kPiecesOfChunk));
    sum += dot_bf16(out[i].x, dout.x) + dot_bf16(out[i].y, dout.y) + dot_bf16(out[i].z, dout.z) +
           dot_bf16(out[i].w, dout.w);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// What the score warpgroup knows of one row, a head: P = 2^(S * scale * log2 e + base) and
// dS = P * (dP * dp_factor + offset); the value part of dkv takes P * share. All is zero where there is no head.
struct RowFactors {
  float base = 0.f, share = 0.f, dp_factor = 0.f, offset = 0.f;

  template <Config kC>
  __device__ __forceinline__ RowFactors(const SharedStorage<kC>& shared, const Params& p, const Item& item, int head,
                                        int lane) {
    const bool exists = head < item.heads_left(p);
    const int64_t row = item.first_row(p) + (exists ? head : 0);
    const float dot = output_dot<kC>(shared, static_cast<const Bf16*>(p.out) + row * kC.d_v, head, lane);
    if (!exists) return;
    const float lse = p.lse[row];
    base = lse == -INFINITY ? -INFINITY : -lse * kLog2E;
    share = 1.f;
    if (p.attn_sink != nullptr) {
      share = share_beside_sink(lse, p.attn_sink[(item.first_head(p) + head) * p.attn_sink_stride]);
      if (lane % 4 == 0) p.sink_terms[row] = (share - 1.f) * dot;
    }
    dp_factor = share * p.sm_scale;
    offset = ((p.dlse != nullptr ? p.dlse[row] : 0.f) - share * dot) * p.sm_scale;
  }
};

template <Config kC>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const Params& p, const Item& item, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  wait(&shared.inputs_full, 0);
  const RowFactors rows[2] = {{shared, p, item, row, lane}, {shared, p, item, row + 8, lane}};
  const float scale_log2 = p.sm_scale * kLog2E;

  ScoreMmaFromShared mma;
  Tensor s_q = make_tensor(make_smem_ptr(shared.q), RowsByColumns<kC.d_qk>{});
  Tensor s_k = make_tensor(make_smem_ptr(shared.keys), RowsByColumns<kC.d_qk>{});
  Tensor s_do = make_tensor(make_smem_ptr(shared.dout), RowsByColumns<kC.d_v>{});
  Tensor r_q = mma.get_slice(thread).partition_fragment_A(s_q);
  Tensor r_k = mma.get_slice(thread).partition_fragment_B(s_k);
  Tensor r_do = mma.get_slice(thread).partition_fragment_A(s_do);
  Tensor r_s = partition_fragment_C(mma, Shape<_64, _64>{});
  Tensor r_dp = partition_fragment_C(mma, Shape<_64, _64>{});

  for (int j = 0; j < item.tiles; ++j) {
    const uint32_t parity = j % 2;
    wait(&shared.front_full, parity);
    wait(&shared.back_full, parity);
    if (any_visible(shared.visible[parity])) {
      // S = Q K^T, dP = dO V^T
      fence_async_proxy();
      warpgroup_fence_operand(r_s);
      warpgroup_fence_operand(r_dp);
      warpgroup_arrive();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int k = 0; k < size<2>(r_q); ++k) {
        gemm(mma, r_q(_, _, k), r_k(_, _, k), r_s);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int k = 0; k < size<2>(r_do); ++k) {
        gemm(mma, r_do(_, _, k), r_k(_, _, k), r_dp);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();

      warpgroup_wait<1>();
      warpgroup_fence_operand(r_s);
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, rows[i / 2 % 2].base));
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dp);
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        const RowFactors& row = rows[i / 2 % 2];
        r_dp(i) = r_s(i) * fmaf(r_dp(i), row.dp_factor, row.offset);
        r_s(i) *= row.share;
      }
      const VisibleColumns visible(shared.visible[parity], lane);
      if (!visible.all()) {
#pragma unroll
        for (int i = 0; i < size(r_s); ++i) {
          if (!visible[i]) r_s(i) = r_dp(i) = 0.f;
        }
      }
      wait(&shared.probs_read, parity ^ 1);
      store_accumulators<kBlockK>(shared_address(shared.probs), r_s, thread);
      store_accumulators<kBlockK>(shared_address(shared.dscores), r_dp, thread);
      fence_async_proxy();
      arrive(&shared.probs_written);
      wait(&shared.probs_written, parity);
      add_key_gradients<kC, kScoreRole>(shared, p, shared.ids[0][parity], thread);
    } else {
      wait(&shared.probs_read, parity ^ 1);
      arrive(&shared.probs_written);
      arrive(&shared.probs_read);
    }
  }
}

}  // namespace dsa::sparse_mla_bwd
