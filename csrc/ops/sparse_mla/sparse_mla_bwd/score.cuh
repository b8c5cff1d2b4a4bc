// The score warpgroup: computes P and dS of each tile.
#pragma once

#include "key_gradients.cuh"
#include "merged.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/registers.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/softmax.cuh"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_bwd {

// A row of O, distributed over a quad of lanes.
template <Config kC>
struct OutputRow {
  static constexpr int kQuad = 4, kPieces = kC.d_v / 8 / kQuad, kPiecesPerChunk = kChunkColumns / 8;
  uint4 pieces[kPieces];

  __device__ __forceinline__ OutputRow(const Params& p, const ItemOf<kC>& item, int tile_row, int lane) {
    const int64_t row = item.row(p, item.has(p, tile_row) ? tile_row : 0);
    const uint4* g_row = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.out) + row * kC.d_v) + lane % kQuad;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = __ldg(g_row + kQuad * i);
  }
  // sum(dO * O); every lane of the quad gets it.
  __device__ __forceinline__ float dot(const SharedStorage<kC>& shared, int tile_row, int lane) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = kQuad * i + lane % kQuad;
      const char* chunk = reinterpret_cast<const char*>(shared.dout + piece / kPiecesPerChunk * kChunkElements);
      const uint4 dout = *reinterpret_cast<const uint4*>(chunk + swizzled_offset(tile_row, piece % kPiecesPerChunk));
      sum += dot_bf16(pieces[i].x, dout.x) + dot_bf16(pieces[i].y, dout.y) + dot_bf16(pieces[i].z, dout.z) +
             dot_bf16(pieces[i].w, dout.w);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

// Per-row (per-head) factors: P = 2^(S * scale * log2 e + base) and dS = P * (dP * slope + offset); the value part of
// dkv takes P * share, and slope is share * scale. All are zero for a missing row.
struct RowFactors {
  float base = 0.f, share = 0.f, slope = 0.f, offset = 0.f;

  // Without the term sum(dO * O).
  template <class Item>
  __device__ __forceinline__ RowFactors(const Params& p, const Item& item, int tile_row) {
    if (!item.has(p, tile_row)) return;
    const int64_t row = item.row(p, tile_row);
    const float lse = p.lse[row];
    base = base_of_lse(lse);
    share =
        p.attn_sink == nullptr ? 1.f : share_after_sink(lse, p.attn_sink[item.head(p, tile_row) * p.attn_sink_stride]);
    slope = share * p.sm_scale;
    offset = p.dlse != nullptr ? p.dlse[row] * p.sm_scale : 0.f;
  }
  template <class Item>
  __device__ __forceinline__ void subtract_output_dot(const Params& p, const Item& item, int tile_row, float dot,
                                                      int lane) {
    if (!item.has(p, tile_row)) return;
    offset -= slope * dot;
    if (p.attn_sink != nullptr && lane % 4 == 0) p.sink_terms[item.row(p, tile_row)] = (share - 1.f) * dot;
  }
};

// Issues and commits r_product = A B^T, over the first kColumns of two rows of chunks.
template <int kColumns, int kSizeA, int kSizeB, class Accumulator>
__device__ __forceinline__ void multiply_rows(Bf16 (&a)[kSizeA], Bf16 (&b)[kSizeB], Accumulator& r_product,
                                              int thread) {
  using namespace cute;
  ScoreMmaFromShared mma;
  Tensor s_a = make_tensor(make_smem_ptr(a), RowsByColumns<kColumns>{});
  Tensor s_b = make_tensor(make_smem_ptr(b), RowsByColumns<kColumns>{});
  Tensor r_a = mma.get_slice(thread).partition_fragment_A(s_a);
  Tensor r_b = mma.get_slice(thread).partition_fragment_B(s_b);
  multiply(mma, r_a, r_b, r_product);
  warpgroup_commit_batch();
}

// Issues the TMA loads of Q and dO.
template <Config kC>
__device__ __forceinline__ void load_inputs(SharedStorage<kC>& shared, const MapsOf<kC>& maps) {
  expect_bytes(&shared.inputs_full, sizeof(shared.q) + sizeof(shared.dout));
  HeadTile at = shared.place.heads;
  const auto& of_item = maps.of_item(shared);
#pragma unroll 1
  for (int c = 0; c < kC.d_qk / kChunkColumns; ++c, at.column += kChunkColumns) {
    tma_load(shared.chunk(shared.q, c), &of_item.q, at, &shared.inputs_full);
    if (c < kValueChunks) tma_load(shared.chunk(shared.dout, c), &of_item.dout, at, &shared.inputs_full);
  }
  arrive(&shared.inputs_full);
}

// Waits until all CTAs of earlier waves but one have finished. With ascending ids, the CTAs of a wave then sweep
// through the keys together, and the keys and sums in use stay in L2. Only performance depends on it, so the wait has a
// time limit.
__device__ __forceinline__ void wait_for_earlier_waves(const Params& p) {
  constexpr int kMaxWaitClocks = 1 << 20;  // clocks
  const int enough = static_cast<int>(blockIdx.x) / p.num_sms * p.num_sms - 1;
  const int64_t start = clock64();
  while (*static_cast<const volatile int*>(p.finished) < enough && clock64() - start < kMaxWaitClocks) __nanosleep(100);
}

// Sums of P over the heads of a tile's rows, one for each key: the product of P^T and a matrix of ones, whose columns
// are all the same.
struct KeySums {
  float r_sums[4];

  // Issues and commits the product. P of 64 heads has been written; `s_ones`: kOnes ones.
  __device__ __forceinline__ void multiply(const Bf16* s_probs, const Bf16* s_ones, int thread) {
    using namespace cute;
    using Atom = SM90_64x8x16_F32BF16BF16_SS<GMMA::Major::MN, GMMA::Major::K>;
    Tensor s_p = make_tensor(make_smem_ptr(s_probs), ColumnsByRows<kBlockK>{});
    Tensor r_p = Tiled<Atom>{}.get_slice(thread).partition_fragment_A(s_p);
    GmmaDescriptor ones;  // without strides: all of its 8 x 8 matrices are the same
    ones.desc_ = 0;
    ones.bitfield.start_address_ = shared_address(s_ones) >> 4;
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < size<2>(r_p); ++k) {
      Atom::fma(r_p(0, 0, k).desc_, ones.desc_, r_sums[0], r_sums[1], r_sums[2], r_sums[3],
                k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
    }
    warpgroup_commit_batch();
  }

  // Writes the sums of the j-th tile that is taken. The product is complete.
  __device__ __forceinline__ void write(const ItemPlace& place, float* g_dist, int j, int warp, int lane) {
    for (float& sum : r_sums) cute::warpgroup_fence_operand(sum);
    const int from_first = j + place.first_tile, tiles = place.tiles;
    const int tile = from_first < tiles ? from_first : from_first - tiles;
    const int second = lane % 4;  // of the two rows that a quad has
    const int slot = tile * kBlockK + warp * 16 + lane / 4 + 8 * second;
    if (second < 2 && slot < place.slots) __stcs(g_dist + slot, second ? r_sums[2] : r_sums[0]);
  }
};

template <Config kC, bool kDeterministic, bool kDist>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const Params& p, const ItemOf<kC>& item,
                                      const MapsOf<kC>& maps, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, row = warp * 16 + lane / 4;
  if (thread == 0) load_inputs<kC>(shared, maps);
  RowFactors rows[2] = {{p, item, row}, {p, item, row + 8}};
  [[maybe_unused]] int listed_rows[2];
  if constexpr (kC.merged) listed_rows[0] = item.listed_row(p, row), listed_rows[1] = item.listed_row(p, row + 8);
  {
    const OutputRow<kC> out(p, item, row, lane);
    wait(&shared.inputs_full, 0);
    rows[0].subtract_output_dot(p, item, row, out.dot(shared, row, lane), lane);
  }
  const OutputRow<kC> out(p, item, row + 8, lane);
  rows[1].subtract_output_dot(p, item, row + 8, out.dot(shared, row + 8, lane), lane);
  const float scale_log2 = p.sm_scale * kLog2E;

  Tensor r_s = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});
  Tensor r_dp = partition_fragment_C(ScoreMmaFromShared{}, Shape<_64, _64>{});

  if (p.finished != nullptr) {
    if (thread == 0) wait_for_earlier_waves(p);
    sync_warpgroup<kScoreBarrier>();
  }
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
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        const RowFactors& row = rows[i / 2 % 2];
        r_dp(i) = r_s(i) * fmaf(r_dp(i), row.slope, row.offset);
        r_s(i) *= row.share;
      }
      if constexpr (kC.merged) {
        mask_others(shared.merged.listed[parity], listed_rows, lane, r_s, r_dp);
      } else {
        // Missing heads have Q = 0, and 0 times a key that is not finite is NaN.
        if (item.heads_left(p) < kBlockHeads) {
#pragma unroll
          for (int i = 0; i < size(r_s); ++i) {
            if (row + i / 2 % 2 * 8 >= item.heads_left(p)) r_s(i) = r_dp(i) = 0.f;
          }
        }
        const VisibleColumns visible(shared.visible[parity], lane);
        if (!visible.all()) {
#pragma unroll
          for (int i = 0; i < size(r_s); ++i) {
            if (!visible[i]) r_s(i) = r_dp(i) = 0.f;
          }
        }
      }
      wait(&shared.probs_read, parity ^ 1);
      store_accumulators<kBlockK>(shared_address(shared.probs), r_s, thread);
      store_accumulators<kBlockK>(shared_address(shared.dscores), r_dp, thread);
      fence_async_proxy();
      arrive(&shared.probs_written);
      wait(&shared.probs_written, parity);
      [[maybe_unused]] KeySums sums;
      if constexpr (kDist) sums.multiply(shared.probs, shared.ones, thread);
      add_key_gradients<kC, kScoreRole, kDeterministic>(shared, p, j, thread);
      if constexpr (kDist) sums.write(shared.place, item.dist(p), j, warp, lane);
    } else {
      wait(&shared.probs_read, parity ^ 1);
      arrive(&shared.probs_written);
      arrive(&shared.probs_read);
    }
  }
}

}  // namespace dsa::sparse_mla_bwd
