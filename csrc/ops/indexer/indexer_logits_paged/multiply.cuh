// The multiplying warpgroups of the indexer_logits_paged kernel.
//
// A pass over 128 rows of Q is two products of 64 rows, with accumulators of their own: while one is summed over heads,
// the other is being multiplied. The second one of a tile's last pass is summed beside the first product of the next
// tile, when the former's stage and queries have been released already. ptxas wants each product to end in the
// iteration that sums it or in which it began; so the first product, and not the second one, is under way where the
// loop closes.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "sm90/memory.cuh"
#include "sm90/registers.cuh"
#include "storage.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::indexer_logits_paged {

// What a thread keeps of a pass over the queries of a tile, up to its logits. Of the sums of a warp's 16 keys, a lane
// ends up with one key, for every other query; for one query, half of the lanes do.
template <class Element, Config kC>
struct PassSums {
  static constexpr int kQueries = kC.pass_queries(), kProductQueries = kProductRows / kC.heads;
  float weights[kProductRows / 4];  // of one product
  float sums[kQueries];
  int lengths[(kQueries + 1) / 2];  // -1 where there is no query
  float* g_lane;                    // where the first of the lane's queries has the lane's first key
  float scale;
  int first_key, keys;

  __device__ __forceinline__ void load_weights(const SharedStorage<Element, kC>& shared, int q_slot, int first_row) {
#pragma unroll
    for (int i = 0; i < kProductRows / 4; i += 4) {
      const int row = first_row + i * 4 + threadIdx.x % 4 * 4;
      const auto four = *reinterpret_cast<const float4*>(shared.weights[q_slot] + row);
      weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void load_lengths(const SharedStorage<Element, kC>& shared, const Params& p, int q_slot,
                                               int first_query, int odd) {
#pragma unroll
    for (int i = 0; i < kQueries; i += 2) {
      const int query = first_query + i + odd, length = shared.lengths[q_slot][min(query, kMaxQueries - 1)];
      lengths[i / 2] = i + odd < kQueries && query < p.queries ? length : -1;
    }
  }

  template <int kProduct, class Scores>
  __device__ __forceinline__ void add_heads(const Scores& r_s, int upper) {
    float of_product[kProductQueries];
    indexer_logits::sum_heads<Element, kC.heads, kProductRows>(r_s, weights, upper, of_product);
#pragma unroll
    for (int i = 0; i < kProductQueries; ++i) sums[kProduct * kProductQueries + i] = of_product[i];
  }

  // Without branches, which ptxas does not allow beside a product.
  __device__ __forceinline__ void store_logits(const Params& p, int lane_key, int odd) const {
    const int key = first_key + lane_key, last_key = keys >= 0 ? first_key + keys : first_key;
    const bool is_stored = lane_key < abs(keys) && key < p.columns;
    float* g_logit = g_lane + first_key;
#pragma unroll
    for (int i = 0; i < kQueries; i += 2, g_logit += 2 * p.logits_stride) {
      const float even_sum = sums[i], odd_sum = sums[i + 1 < kQueries ? i + 1 : i];
      const float sum = (odd ? odd_sum : even_sum) + __shfl_xor_sync(~0u, odd ? even_sum : odd_sum, 1);
      const float logit = kIsFp8<Element> ? sum * scale : sum;
      store_if(is_stored && lengths[i / 2] >= 0, g_logit, key < min(last_key, lengths[i / 2]) ? logit : -INFINITY);
    }
  }
};

// Multiplies keys and sums over heads. `thread` is in [0, kMathThreads).
template <class Element, Config kC>
__device__ __forceinline__ void multiply(SharedStorage<Element, kC>& shared, const Params& p, int thread) {
  using namespace cute;
  using namespace dsa::tiles;
  constexpr int kColumns = kC.row_bytes / sizeof(Element), kQSlots = kC.q_slots(), kRows = kC.pass_rows;
  constexpr bool kIsSplit = kRows > kProductRows;
  static_assert(kRows == kProductRows || kRows == 2 * kProductRows);
  using Atom = std::conditional_t<kC.chunk_bytes() == 128, GMMA::Layout_K_SW128_Atom<Element>,
                                  GMMA::Layout_K_SW64_Atom<Element>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kProductRows>, Int<32 / int(sizeof(Element))>>,
                           GMMA::Major::K, GMMA::Major::K>()));
  const int lane = thread % 32, warp = thread / 32 % 4;
  Mma mma;
  const auto slice = mma.get_slice(thread % 128);
  // Descriptors of all operands.
  const Tensor r_q = slice.partition_fragment_B(
      make_tensor(make_smem_ptr(shared.q[0][0]),
                  tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kColumns>, Int<kQSlots * kC.max_passes()>>{})));
  const Tensor r_keys = slice.partition_fragment_A(make_tensor(
      make_smem_ptr(shared.keys[0]), tile_to_shape(Atom{}, Shape<Int<kTileKeys>, Int<kColumns>, Int<kC.stages()>>{})));
  Tensor r_first = partition_fragment_C(mma, Shape<_64, Int<kProductRows>>{}), r_second = make_fragment_like(r_first);

  const int upper = lane >> 1 & 1, odd = lane & 1;
  const int lane_key = warp * 16 + upper * 8 + lane / 4;
  const int passes = passes_of<kC>(p);
  const int64_t pass_stride = PassSums<Element, kC>::kQueries * p.logits_stride;
  float* g_lane = nullptr;  // of the pass
  PassSums<Element, kC> sums;
  Ring<kC.stages()> ring;
  ring.advance(cutlass::canonical_warp_group_idx());
  Tile tile;
  int ordinal = -1, q_slot = 0, pass = 0;
  // Waits for the tile in the ring and its queries; false at the end.
  const auto await_tile = [&] {
    wait(&shared.tile_full[ring.slot], ring.parity);
    tile = shared.tiles[ring.slot];
    if (tile.sequence < 0) return false;
    const bool is_new = tile.ordinal != ordinal;
    q_slot = tile.ordinal % kQSlots;
    ordinal = tile.ordinal;
    if (is_new) wait(&shared.q_full[q_slot], tile.ordinal / kQSlots & 1);
    if (is_new || passes > 1) {
      g_lane = p.logits + (int64_t{tile.sequence} * p.queries + odd) * p.logits_stride + lane_key;
      if constexpr (!kIsSplit) sums.load_weights(shared, q_slot, 0);
    }
    pass = 0;
    return true;
  };
  // Goes on to the next pass, of the next tile after the last one.
  const auto advance = [&] {
    g_lane += pass_stride;
    if (++pass < passes) return true;
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[ring.slot]);
    ring.advance(kMathWarpgroups);
    return await_tile();
  };
  const auto start = [&](auto& r_s, int product) {
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
    tiles::multiply(mma, r_keys(_, 0, _, ring.slot), r_q(_, product, _, q_slot * kC.max_passes() + pass), r_s(_, 0, 0));
    warpgroup_commit_batch();
  };
  const auto begin_pass = [&] {
    sums.load_lengths(shared, p, q_slot, pass * PassSums<Element, kC>::kQueries, odd);
    sums.g_lane = g_lane, sums.first_key = tile.first_key, sums.keys = tile.keys;
    if constexpr (kIsFp8<Element>) sums.scale = shared.scales[ring.slot][lane_key];
  };

  if (!await_tile()) return;
  if constexpr (kIsSplit) {
    start(r_first, 0);
    while (true) {
      begin_pass();
      start(r_second, 1);
      sums.load_weights(shared, q_slot, pass * kRows);
      warpgroup_wait<1>();
      warpgroup_fence_operand(r_first);
      sums.template add_heads<0>(r_first, upper);
      sums.load_weights(shared, q_slot, pass * kRows + kProductRows);
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_second);
      use(__float_as_uint(sums.weights[kProductRows / 4 - 1]));  // they have arrived before their slot is released
      if (!advance()) break;
      start(r_first, 0);
      sums.template add_heads<1>(r_second, upper);
      sums.store_logits(p, lane_key, odd);
    }
    sums.template add_heads<1>(r_second, upper);
    sums.store_logits(p, lane_key, odd);
  } else {
    do {
      start(r_first, 0);
      begin_pass();
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_first);
      sums.template add_heads<0>(r_first, upper);
      sums.store_logits(p, lane_key, odd);
    } while (advance());
  }
}

}  // namespace dsa::indexer_logits_paged
