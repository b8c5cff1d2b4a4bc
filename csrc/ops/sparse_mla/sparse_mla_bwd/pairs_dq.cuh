// dQ = dS K for the pairs of pairs.cuh: CTAs take halves of items in turn, half of the columns of a query's
// group, with all heads. Keys of the next half arrive while dQ of one is stored.
//
// Tiles without visible keys are skipped, as in pairs.cuh, which has not written their dS.
//
// Warp specialization: three warpgroups.
//
//   role      warpgroup  registers  does, for each tile                              waits on  signals
//   multiply  0, 1       208        dQ += dS K of one block of heads                 full      free
//   gather    2          88         half of the keys' columns; dS, by a bulk copy    free      full
#pragma once

#include "pairs.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kDqStages = 4, kDqThreads = 3 * kWarpgroupThreads;

template <int kQk>
struct DqStorage {
  static constexpr int kKeyChunks = kHalfChunks + (kQk > 512);
  alignas(1024) Bf16 keys[kDqStages][kKeyChunks * kChunkElements];
  alignas(1024) Bf16 dscores[kDqStages][2][kBlockHeads * kBlockK];
  uint32_t visible[kDqStages][4];
  uint64_t full[kDqStages], free[kDqStages];
};

// Calls visit(item, half) for each half that the CTA takes. Halves 2 i and 2 i + 1 are those of item i, which has all
// keys and the rows of head block `block`.
template <class Visit>
__device__ __forceinline__ void for_each_half(const Params& p, int halves, int block, Visit visit) {
#pragma unroll 1
  for (int index = blockIdx.x; index < halves; index += gridDim.x) {
    visit(Item::of_query(p, index / 2, block), index % 2);
  }
}

template <int kQk>
__device__ __forceinline__ void gather_for_dq(DqStorage<kQk>& shared, const Params& p, int halves, int thread) {
  Ring<kDqStages> ring;
  const uint32_t piece = swizzled_offset(gather_row(thread), gather_piece(thread));
  for_each_half(p, halves, 0, [&](const Item& item, int half) {
    const ItemPlace place = item.place(p);
    const char* g_keys = place.g_keys + gather_piece(thread) * 16 + half * kHalfChunks * kSwizzleRowBytes;
    const int tail = (2 - half) * kHalfChunks * kSwizzleRowBytes;  // bytes from there to the tail
    const char* g_dscores = static_cast<const char*>(p.dscores) + item.first_dscores * (2 * kProbsBytes);
    const bool has_tail_piece = kQk > 512 && gather_piece(thread) / 4 == half;
    int ids[kGatherRowsPerThread];
    const auto load_ids = [&](int j) {
#pragma unroll
      for (int i = 0; i < kGatherRowsPerThread; ++i) {
        const int slot = j * kBlockK + gather_row(thread) + i * kGatherRowStep;
        ids[i] = slot < place.slots ? __ldg(place.g_ids + slot) : -1;
      }
    };
    load_ids(0);
#pragma unroll 1
    for (int j = 0; j < place.tiles; ++j) {
      const GatherRows rows(g_keys, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, place.ids);
      load_ids(j + 1);
      wait(&shared.free[ring.slot], ring.parity ^ 1);
      if (thread == 0) {
        expect_bytes(&shared.full[ring.slot], 2 * kProbsBytes);
        bulk_load(shared.dscores[ring.slot], g_dscores + int64_t{j} * (2 * kProbsBytes), 2 * kProbsBytes,
                  &shared.full[ring.slot]);
      }
      publish_visible(shared.visible[ring.slot], rows, thread);
      const uint32_t to = shared_address(shared.keys[ring.slot]) + piece;
      rows.template copy<0, 0, kHalfChunks>(to);
      if (has_tail_piece) {
#pragma unroll
        for (int i = 0; i < kGatherRowsPerThread; ++i) {
          copy_16_bytes(to + i * kGatherRowStep * kSwizzleRowBytes + kHalfChunks * kChunkBytes, rows.g_rows[i] + tail,
                        rows.visible >> i & 1 ? 16 : 0);
        }
      }
      arrive(&shared.full[ring.slot]);
      arrive_after_copies(&shared.full[ring.slot]);
      ring.advance();
    }
  });
}

template <int kQk>
__device__ __forceinline__ void multiply_for_dq(DqStorage<kQk>& shared, const Params& p, int halves, int warpgroup,
                                                int thread) {
  using namespace cute;
  Ring<kDqStages> ring;
  using TailMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Bf16, Bf16, float, Shape<_64, _32, _16>, GMMA::Major::K, GMMA::Major::MN>()));
  ValueMma mma;
  TailMma tail_mma;
  Tensor r_dq = partition_fragment_C(mma, Shape<_64, Int<kHalfChunks * kChunkColumns>>{});
  Tensor r_tail = partition_fragment_C(tail_mma, Shape<_64, _32>{});
  mma.accumulate_ = tail_mma.accumulate_ = GMMA::ScaleOut::One;
  const int lane = thread % kWarpThreads;
  for_each_half(p, halves, warpgroup, [&](const Item& item, int half) {
    clear(r_dq);
    clear(r_tail);
    const int tiles = item.tiles;
#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
      wait(&shared.full[ring.slot], ring.parity);
      if (any_visible(shared.visible[ring.slot])) {
        fence_async_proxy();
        Tensor s_ds = make_tensor(make_smem_ptr(shared.dscores[ring.slot][warpgroup]), RowsByColumns<kBlockK>{});
        Tensor s_k = make_tensor(make_smem_ptr(shared.keys[ring.slot]), ColumnsByRows<kHalfChunks * kChunkColumns>{});
        Tensor r_ds = mma.get_slice(thread).partition_fragment_A(s_ds);
        Tensor r_k = mma.get_slice(thread).partition_fragment_B(s_k);
        warpgroup_fence_operand(r_dq);
        warpgroup_fence_operand(r_tail);
        warpgroup_arrive();
        multiply_add(mma, r_ds, r_k, r_dq);
        if constexpr (kQk > 512) {
          Tensor s_chunk = make_tensor(make_smem_ptr(shared.keys[ring.slot] + kHalfChunks * kChunkElements),
                                       ColumnsByRows<kChunkColumns>{});
          Tensor r_chunk = NarrowColumnsMma{}.get_slice(thread).partition_fragment_B(s_chunk);
          Tensor r_k_tail = make_tensor(r_chunk.data() + half * 32 * int(sizeof(Bf16)) / 16, r_chunk.layout());
          Tensor r_ds_tail = tail_mma.get_slice(thread).partition_fragment_A(s_ds);
          multiply_add(tail_mma, r_ds_tail, r_k_tail, r_tail);
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_dq);
        warpgroup_fence_operand(r_tail);
      }
      __syncwarp();  // no lane may find a later phase
      if (lane == 0) arrive(&shared.free[ring.slot]);
      ring.advance();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = thread / kWarpThreads * 16 + lane / 4 + 8 * r;
      const bool exists = item.has(p, row);
      Bf16* g_row = static_cast<Bf16*>(p.dq) + item.row(p, exists ? row : 0) * kQk;
      store_row<kHalfChunks * kChunkColumns>(reinterpret_cast<Piece*>(g_row + half * kHalfChunks * kChunkColumns),
                                             exists, r_dq, r, lane);
      if constexpr (kQk > 512)
        store_row<32>(reinterpret_cast<Piece*>(g_row + 512 + half * 32), exists, r_tail, r, lane);
    }
  });
}

// `halves`: twice the number of items.
template <int kQk>
__global__ void __launch_bounds__(kDqThreads, 1) dq_kernel(const __grid_constant__ Params p, int halves) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<DqStorage<kQk>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads, warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDqStages; ++i) {
      barrier_init(&shared.full[i], 2 * kWarpgroupThreads);
      barrier_init(&shared.free[i], 2 * kWarpsPerWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == 2) {
    set_registers<88, 168>();
    gather_for_dq(shared, p, halves, thread);
  } else {
    set_registers<208, 168>();
    multiply_for_dq(shared, p, halves, warpgroup, thread);
  }
}

}  // namespace dsa::sparse_mla_bwd
