// The score warpgroup: P and dS of each tile.
#pragma once

#include <cfloat>

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
// dS = P * (dP * dp_factor + offset); the value part of dkv takes P * share. All but `base` count in units of the sums,
// and all is zero where there is no head.
struct RowFactors {
  float base = 0.f, share = 0.f, dp_factor = 0.f, offset = 0.f;

  template <Config kC>
  __device__ __forceinline__ RowFactors(const SharedStorage<kC>& shared, const Params& p, const Item& item, int head,
                                        int lane, float unit) {
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
    dp_factor = share * p.sm_scale * unit;
    offset = ((p.dlse != nullptr ? p.dlse[row] : 0.f) - share * dot) * p.sm_scale * unit;
    share *= unit;
  }
};

// Starts r_product = A B^T, over the first kColumns of two rows of chunks, and commits it.
template <int kColumns, int kSizeA, int kSizeB, class Accumulator>
__device__ __forceinline__ void multiply_rows(Bf16 (&a)[kSizeA], Bf16 (&b)[kSizeB], Accumulator& r_product,
                                              int thread) {
  using namespace cute;
  ScoreMmaFromShared mma;
  Tensor s_a = make_tensor(make_smem_ptr(a), RowsByColumns<kColumns>{});
  Tensor s_b = make_tensor(make_smem_ptr(b), RowsByColumns<kColumns>{});
  Tensor r_a = mma.get_slice(thread).partition_fragment_A(s_a);
  Tensor r_b = mma.get_slice(thread).partition_fragment_B(s_b);
  mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
  for (int k = 0; k < size<2>(r_a); ++k) {
    gemm(mma, r_a(_, _, k), r_b(_, _, k), r_product);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Keeps CTAs that run together in step: waits until nearly all CTAs of the waves before this one have finished. With
// ascending ids a wave then sweeps through the keys as one, and the sums that it adds to stay in L2. Nothing but time
// depends on it, so the wait has an end.
__device__ __forceinline__ void wait_for_wave(const Params& p) {
  constexpr int kPatience = 1 << 20;  // clocks
  const int before = blockIdx.x / p.num_sms * p.num_sms, enough = before - p.num_sms / 16;
  const int64_t start = clock64();
  while (before > 0 && *static_cast<volatile const int*>(p.finished) < enough && clock64() - start < kPatience) {
    __nanosleep(200);
  }
}

template <Config kC, class Sum>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const Params& p, const Item& item, int thread) {
  using namespace cute;
  constexpr bool kFixedPoint = sizeof(Sum) != sizeof(float);
  constexpr float kLargestProb = 1.01f;  // what the bound of fixed-point addends holds for
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  if (p.finished != nullptr) {
    if (thread == 0) wait_for_wave(p);
    sync_warpgroup<kScoreBarrier>();
  }
  wait(&shared.inputs_full, 0);
  const float unit = kFixedPoint ? shared.place.sum_scale : 1.f;
  const RowFactors rows[2] = {{shared, p, item, row, lane, unit}, {shared, p, item, row + 8, lane, unit}};
  const float scale_log2 = p.sm_scale * kLog2E;

  Tensor r_s = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});
  Tensor r_dp = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});

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
      multiply_rows<kC.d_qk>(shared.q, shared.keys, r_s, thread);
      multiply_rows<kC.d_v>(recomputed(shared.dout), recomputed(shared.keys), r_dp, thread);

      warpgroup_wait<1>();
      warpgroup_fence_operand(r_s);
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) r_s(i) = exp2_fast(fmaf(r_s(i), scale_log2, rows[i / 2 % 2].base));
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_dp);
      bool fits = true;
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        const RowFactors& row = rows[i / 2 % 2];
        r_dp(i) = r_s(i) * fmaf(r_dp(i), row.dp_factor, row.offset);
        if constexpr (kFixedPoint) fits &= r_s(i) <= kLargestProb && fabsf(r_dp(i)) <= FLT_MAX;
        r_s(i) *= row.share;
      }
      const VisibleColumns visible(shared.visible[parity], lane);
      if (!visible.all()) {
#pragma unroll
        for (int i = 0; i < size(r_s); ++i) {
          if (!visible[i]) r_s(i) = r_dp(i) = 0.f;
        }
      }
      // Fixed-point sums cannot become infinite or NaN, so their keys are marked.
      if (kFixedPoint && !fits) {
#pragma unroll
        for (int i = 0; i < size(r_s); ++i) {
          const int id = shared.ids[0][j % kIdSlots][i / 4 * 8 + lane % 4 * 2 + i % 2];
          const bool fits_here = r_s(i) <= kLargestProb * rows[i / 2 % 2].share && fabsf(r_dp(i)) <= FLT_MAX;
          if (id >= 0 && !fits_here) shared.place.lost_keys[int64_t{id} * p.groups] = 1;
        }
      }
      wait(&shared.probs_read, parity ^ 1);
      store_accumulators<kBlockK>(shared_address(shared.probs), r_s, thread);
      store_accumulators<kBlockK>(shared_address(shared.dscores), r_dp, thread);
      fence_async_proxy();
      arrive(&shared.probs_written);
      wait(&shared.probs_written, parity);
      add_key_gradients<kC, kScoreRole, Sum>(shared, p, shared.ids[0][j % kIdSlots], thread);
    } else {
      wait(&shared.probs_read, parity ^ 1);
      arrive(&shared.probs_written);
      arrive(&shared.probs_read);
    }
  }
}

}  // namespace dsa::sparse_mla_bwd
