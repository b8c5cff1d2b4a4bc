// The score warpgroup: P and dS of each tile.
#pragma once

#include <cfloat>

#include "key_gradients.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"

namespace dsa::sparse_mla_bwd {

// A quad of lanes' row of O.
template <Config kC>
struct OutputRow {
  static constexpr int kQuad = 4, kPieces = kC.d_v / 8 / kQuad, kPiecesOfChunk = kChunkColumns / 8;
  uint4 pieces[kPieces];

  __device__ __forceinline__ OutputRow(const Params& p, const Item& item, int head, int lane) {
    const int64_t row = item.first_row(p) + (head < item.heads_left(p) ? head : 0);
    const uint4* g_row = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.out) + row * kC.d_v) + lane % kQuad;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = __ldg(g_row + kQuad * i);
  }
  // sum(dO * O), in every lane of the quad.
  __device__ __forceinline__ float dot(const SharedStorage<kC>& shared, int head, int lane) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = kQuad * i + lane % kQuad;
      const char* chunk = reinterpret_cast<const char*>(shared.dout + piece / kPiecesOfChunk * kChunkElements);
      const uint4 dout = *reinterpret_cast<const uint4*>(chunk + swizzled_offset(head, piece % kPiecesOfChunk));
      sum += dot_bf16(pieces[i].x, dout.x) + dot_bf16(pieces[i].y, dout.y) + dot_bf16(pieces[i].z, dout.z) +
             dot_bf16(pieces[i].w, dout.w);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

// What the score warpgroup knows of one row, a head: P = 2^(S * scale * log2 e + base) and
// dS = P * (dP * share * scale + offset); the value part of dkv takes P * share. All but `base` count in units of the
// sums, and all is zero where there is no head.
struct RowFactors {
  float base = 0.f, share = 0.f, offset = 0.f;

  // Without sum(dO * O).
  __device__ __forceinline__ RowFactors(const Params& p, const Item& item, int head, float unit) {
    if (head >= item.heads_left(p)) return;
    const int64_t row = item.first_row(p) + head;
    const float lse = p.lse[row];
    base = lse == -INFINITY ? -INFINITY : -lse * kLog2E;
    share = p.attn_sink == nullptr
                ? unit
                : unit * share_beside_sink(lse, p.attn_sink[(item.first_head(p) + head) * p.attn_sink_stride]);
    offset = p.dlse != nullptr ? p.dlse[row] * p.sm_scale * unit : 0.f;
  }
  __device__ __forceinline__ void subtract_output_dot(const Params& p, const Item& item, int head, float unit,
                                                      float dot, int lane) {
    if (head >= item.heads_left(p)) return;
    offset -= share * p.sm_scale * dot;
    if (p.attn_sink != nullptr && lane % 4 == 0) p.sink_terms[item.first_row(p) + head] = (share / unit - 1.f) * dot;
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

// Starts the copies of Q and dO.
template <Config kC>
__device__ __forceinline__ void load_inputs(SharedStorage<kC>& shared, const CUtensorMap& q_map,
                                            const CUtensorMap& dout_map) {
  expect_bytes(&shared.inputs_full, sizeof(shared.q) + sizeof(shared.dout));
  HeadTile at = shared.place.heads;
#pragma unroll 1
  for (int c = 0; c < kC.d_qk / kChunkColumns; ++c, at.column += kChunkColumns) {
    tma_load(shared.chunk(shared.q, c), &q_map, at, &shared.inputs_full);
    if (c < kValueChunks) tma_load(shared.chunk(shared.dout, c), &dout_map, at, &shared.inputs_full);
  }
  arrive(&shared.inputs_full);
}

// Keeps CTAs that run together in step: a CTA starts when those of earlier waves have finished, but for one; and where
// it takes steps, each waits until nearly all CTAs of its wave have taken as many. With ascending ids a wave then
// sweeps through the keys as one, and the sums that it adds to stay in L2. Nothing but time depends on it, so who has
// waited in vain for long waits no more.
template <class Sum>
struct Pace {
  static constexpr int kPatience = 1 << 20;  // clocks
  const volatile int* g_steps;               // that all CTAs have taken, or null
  int first, width;                          // steps of earlier waves, CTAs of this one
  bool patient = true;

  __device__ __forceinline__ explicit Pace(const Params& p) : g_steps(p.steps) {
    const int wave = blockIdx.x / p.num_sms;
    first = wave * p.num_sms * steps_of_cta<Sum>(p.topk);
    width = min(p.num_sms, static_cast<int>(gridDim.x) - wave * p.num_sms);
  }
  __device__ __forceinline__ void wait_for_step(int step) {
    const int enough = first + (step == 0 ? -1 : step * width - width / 16);
    const int64_t start = clock64();
    while (patient && *g_steps < enough) {
      __nanosleep(100);
      patient = clock64() - start < kPatience;
    }
  }
};

template <Config kC, class Sum>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const Params& p, const Item& item,
                                      const CUtensorMap& q_map, const CUtensorMap& dout_map, int thread) {
  using namespace cute;
  constexpr bool kFixedPoint = sizeof(Sum) != sizeof(float);
  constexpr float kLargestProb = 1.01f;  // what the bound of fixed-point addends holds for
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  if (thread == 0) load_inputs<kC>(shared, q_map, dout_map);
  const float unit = kFixedPoint ? shared.place.sum_scale : 1.f;
  RowFactors rows[2] = {{p, item, row, unit}, {p, item, row + 8, unit}};
  {
    const OutputRow<kC> out(p, item, row, lane);
    wait(&shared.inputs_full, 0);
    rows[0].subtract_output_dot(p, item, row, unit, out.dot(shared, row, lane), lane);
  }
  const OutputRow<kC> out(p, item, row + 8, lane);
  rows[1].subtract_output_dot(p, item, row + 8, unit, out.dot(shared, row + 8, lane), lane);
  Pace<Sum> pace(p);
  const float scale_log2 = p.sm_scale * kLog2E;

  Tensor r_s = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});
  Tensor r_dp = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});

  for (int j = 0; j < item.tiles; ++j) {
    const uint32_t parity = j % 2;
    if (p.steps != nullptr && j % kTilesOfStep<Sum> == 0) {
      if (thread == 0) pace.wait_for_step(j / kTilesOfStep<Sum>);
      sync_warpgroup<kScoreBarrier>();
    }
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
        r_dp(i) = r_s(i) * fmaf(r_dp(i) * row.share, p.sm_scale, row.offset);
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
