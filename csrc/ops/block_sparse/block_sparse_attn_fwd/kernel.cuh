// Block-sparse attention, forward. Math: docs/block_sparse/block_sparse_attn.md.
//
// Warp specialization: three streams, each a compute warpgroup with query blocks and a ring buffer of its own and a
// producer warp. Who does what:
//
//   role     threads                        registers  does                                      waits on   signals
//   compute  warpgroups 0, 1, 2             160        S = Q K^T, online softmax, O += P V       full       empty
//                                                      end of a piece: stores O and lse
//                                                      shared list: joins with the other two     named barriers
//   copy     warps 0, 1, 2 of warpgroup 3   32         loads Q, listed K and V blocks (TMA)      empty      full
//
// While one stream waits, the others keep the tensor cores busy. Through a ring pass the queries of a piece of work,
// then keys and values of each listed block in turn, then an end marker (mark), whose tile stages the output on its way
// to global memory. In the last round, the three streams of a CTA share lists and then join their results.
#pragma once

#include "ops/block_sparse/lists.cuh"
#include "ops/block_sparse/operands.cuh"
#include "params.h"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "softmax.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/mma.cuh"

namespace dsa::block_sparse_attn_fwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kThreads = (kStreams + 1) * kWarpgroupThreads;
inline constexpr int kComputeRegisters = 160, kCopyRegisters = 32, kStartRegisters = 128;
// A block of at most so many valid keys is short: the product with its values skips the rows after them.
inline constexpr int kShortBlock = kBlock - 16;

// The end of a piece: its query block, and what becomes of the result.
struct Mark {
  int block, head, batch;
  int is_shared;     // by the streams of the CTA
  int partial_slot;  // of a result that is only a part, else -1
};

template <int kColumns>
struct Stream {
  static constexpr int kSlots = 4 * 128 / kColumns;

  alignas(1024) Bf16 tiles[kSlots][kBlock * kColumns];
  int keys[kSlots];  // valid keys of the block; 0 at an end marker
  Mark marks[kSlots];
  uint64_t full[kSlots], empty[kSlots];
  float offsets[kBlock], sums[kBlock];  // this stream's part of a shared list
};

template <int kColumns>
struct SharedStorage {
  Stream<kColumns> streams[kStreams];
  float4 joined[kColumns / 8][kWarpgroupThreads];  // accumulators of a shared list, in fragment order
};

template <int kColumns>
__device__ __forceinline__ void copy(Stream<kColumns>& shared, const Params& p, const CUtensorMap& q_map,
                                     const CUtensorMap& k_map, const CUtensorMap& v_map, int stream, int lane) {
  Ring<Stream<kColumns>::kSlots> ring;
  const auto next_slot = [&] { wait(&shared.empty[ring.slot], ring.parity ^ 1); };
  const auto send = [&](const CUtensorMap& map, int keys, int head, int position, int batch) {
    next_slot();
    if (lane == 0) {
      shared.keys[ring.slot] = keys;
      load_block<kColumns>(shared.tiles[ring.slot], &map, head, position, batch, &shared.full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
  };
  const auto send_mark = [&](const Mark& mark) {
    next_slot();
    if (lane == 0) {
      shared.keys[ring.slot] = 0, shared.marks[ring.slot] = mark;
      arrive(&shared.full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
  };
  send_mark({});  // as if a piece had ended
  const int team = blockIdx.x;
  Pieces pieces(p.plan, team + stream * gridDim.x);
  for (Piece piece; pieces.next(piece);) {
    const Item item(piece.item, p.q_blocks, p.heads);
    const int kv_head = item.head / (p.heads / p.kv_heads);
    send(q_map, kBlock, item.head, item.block * kBlock, item.batch);
    const List list = listed_blocks(p, item);
    const bool is_shared = piece.item >= p.plan.whole;
    int first = list.count * piece.begin / p.plan.units, end = list.count * piece.end / p.plan.units;
    if (is_shared) {
      const int count = end - first;
      end = first + count * (stream + 1) / kStreams, first += count * stream / kStreams;
    }
    for (; first < end; first += kWarpThreads) {
      const int id = first + lane < end ? __ldg(list.g_ids + first + lane) : -1, keys = valid_keys(p, id);
      for (unsigned left = __ballot_sync(~0u, keys > 0); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int position = __shfl_sync(~0u, id, from) * kBlock, valid = __shfl_sync(~0u, keys, from);
        send(k_map, valid, kv_head, position, item.batch);
        send(v_map, valid, kv_head, position, item.batch);
      }
    }
    const bool is_part = piece.end - piece.begin < p.plan.units;
    send_mark({item.block, item.head, item.batch, is_shared, is_part ? partial_slot(team, piece.begin == 0) : -1});
  }
  send_mark({});
}

// Joins the CTA's streams' results of one query block, in a fixed order; returns true for the stream that then has it.
template <int kColumns, class Out>
__device__ __forceinline__ bool join_team(SharedStorage<kColumns>& shared, Softmax& softmax, Out& r_out, int stream,
                                          int thread) {
  constexpr int kJoinBarrier = kStreams + 1;  // and the ones after it, between neighboring streams
  const int lane = thread % kWarpThreads, first_row = thread / kWarpThreads * 16 + lane / 4;
  if (lane % 4 == 0) {
    for (int r = 0; r < 2; ++r) {
      shared.streams[stream].offsets[first_row + r * 8] = softmax.sum[r] == 0.f ? -INFINITY : softmax.top[r];
      shared.streams[stream].sums[first_row + r * 8] = softmax.sum[r];
    }
  }
  sync_threads(kJoinBarrier, kStreams * kWarpgroupThreads);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    float top = -INFINITY, sum = 0.f;
    for (const auto& of : shared.streams) top = fmaxf(top, of.offsets[row]);
    const float base = top == -INFINITY ? 0.f : top;
    for (const auto& of : shared.streams) sum += of.sums[row] * exp2_fast(of.offsets[row] - base);
    const float factor = exp2_fast(shared.streams[stream].offsets[row] - base);
    softmax.top[r] = base, softmax.sum[r] = sum;
#pragma unroll
    for (int i = 2 * r; i < r_out.size(); i += 4) r_out(i) *= factor, r_out(i + 1) *= factor;
  }
  sync_threads(kJoinBarrier, kStreams * kWarpgroupThreads);  // all have read what the next list overwrites
  if (stream + 1 < kStreams) {
    sync_threads(kJoinBarrier + 1 + stream, 2 * kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < r_out.size(); i += 4) {
      const float4 other = shared.joined[i / 4][thread];
      r_out(i) += other.x, r_out(i + 1) += other.y, r_out(i + 2) += other.z, r_out(i + 3) += other.w;
    }
  }
  if (stream == 0) return true;
#pragma unroll
  for (int i = 0; i < r_out.size(); i += 4) {
    shared.joined[i / 4][thread] = {r_out(i), r_out(i + 1), r_out(i + 2), r_out(i + 3)};
  }
  sync_threads(kJoinBarrier + stream, 2 * kWarpgroupThreads);
  return false;
}

// Scores of columns from `keys` on become -inf. Unlike for_columns_from, it stops at the first eight columns that are
// all valid: 3 % of the time if every block of keys has 32 to 64 of them.
template <class Scores>
__device__ __forceinline__ void hide_columns_from(int keys, Scores& r_s, int thread) {
  const int left = keys - thread % 4 * 2;  // from this thread's first column on
#pragma unroll
  for (int i = r_s.size() - 4; i >= 0; i -= 4) {
    if (column_of_value(i + 4, 0) <= keys) break;
    for (int j = i; j < i + 4; ++j) {
      if (column_of_value(j, 0) >= left) r_s(j) = -INFINITY;
    }
  }
}

// The normalized output and lse of a piece: to the results, or as a part for combine_kernel.
template <int kColumns, class Out>
__device__ __forceinline__ void store_result(Softmax& softmax, Out& r_out, const Mark& mark, Bf16* s_out,
                                             const Params& p, const CUtensorMap& out_map, int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const float shares[2] = {softmax.share(0), softmax.share(1)};
#pragma unroll
  for (int i = 0; i < r_out.size(); ++i) r_out(i) *= shares[i / 2 % 2];
  const int row = warp * 16 + lane / 4, partial_slot = read_for_warp(mark.partial_slot);
  if (partial_slot >= 0) {
    const int64_t first_row = static_cast<int64_t>(partial_slot) * kBlock;
    store_accumulators_to_global(p.partial_out + first_row * kColumns, kColumns, r_out, thread);
    if (lane % 4 == 0) {
      for (int r = 0; r < 2; ++r) p.partial_lse[first_row + row + r * 8] = softmax.lse_log2(r);
    }
    return;
  }
  store_block<kColumns>(&out_map, s_out, mark.head, mark.block * kBlock, mark.batch, r_out, thread);
  if (lane % 4 == 0) {
    float* g_lse = p.lse + (static_cast<int64_t>(mark.batch) * p.heads + mark.head) * p.seq_q;
    for (int r = 0; r < 2; ++r) {
      const int query = mark.block * kBlock + row + r * 8;
      if (query < p.seq_q) g_lse[query] = softmax.lse_log2(r) * kLn2;
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void compute(Stream<kColumns>& shared, SharedStorage<kColumns>& team, const Params& p,
                                        const CUtensorMap& out_map, int thread) {
  using namespace cute;
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  ScoreMmaFromRegisters score_mma;
  RowsMma<kColumns> value_mma;
  RowsOperand<kColumns> r_q;
  Tensor r_s = partition_fragment_C(score_mma, Shape<_64, _64>{});
  Tensor r_p = make_tensor<Bf16>(Shape<Shape<_2, _2, _2>, _1, _4>{});
  Tensor r_out = partition_fragment_C(value_mma, Shape<_64, Int<kColumns>>{});

  Ring<Stream<kColumns>::kSlots> ring;
  const auto wait_full = [&] { wait(&shared.full[ring.slot], ring.parity); };
  const auto release = [&] {
    arrive(&shared.empty[ring.slot]);
    ring.advance();
  };
  constexpr int kSlots = Stream<kColumns>::kSlots;
  const auto release_previous = [&](int slots) { arrive(&shared.empty[(ring.slot + kSlots - slots) % kSlots]); };
  const uint32_t flip = p.sm_scale < 0.f ? 0x80008000u : 0u;
  wait_full();
  ring.advance();  // a piece always follows an end marker
  for (;;) {
    wait_full();
    if (shared.keys[ring.slot] == 0) break;  // no further piece
    for_operand_pairs<kColumns>(shared.tiles[ring.slot], thread, [&](int i, const uint32_t (&pairs)[4]) {
      for (int j = 0; j < 4; ++j) pairs_of(r_q)[i][j] = pairs[j] ^ flip;
    });
    warpgroup_fence_operand(r_q);
    ring.advance();
    if (thread == 0) tma_store_wait_read();
    release_previous(2);  // the end marker, whose tile the last output has left
    // The slot of Q is released after a product has waited for the loads: ptxas may move an arrival ahead of loads that
    // are not complete.
    const auto release_queries = [&] { release_previous(1); };

    clear(r_out);
    Softmax softmax;
    for (;;) {
      wait_full();
      const int keys = shared.keys[ring.slot];
      if (keys == 0) {
        if (softmax.is_first) release_queries();
        break;
      }
      const auto r_k = score_mma.get_slice(thread).partition_fragment_B(
          make_tensor(make_smem_ptr(shared.tiles[ring.slot]), RowsByColumns<kColumns>{}));
      // Once, and once more if the maximum has to move: the probabilities overwrite the scores' registers.
      for (bool again = false;; again = true) {
        warpgroup_fence_operand(r_s);
        warpgroup_arrive();
        multiply(score_mma, r_q, r_k, r_s);
        warpgroup_commit_batch();
        // Overlaps with the product. The barrier in `add` comes before the use.
        if (keys < kBlock) {
          auto values = ring;
          values.advance();
          wait(&shared.full[values.slot], values.parity);
          clear_rows<kColumns>(shared.tiles[values.slot], keys, keys > kShortBlock ? kBlock : kShortBlock,
                               recomputed(thread));
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(r_s);
        if (keys < kBlock) hide_columns_from(keys, r_s, recomputed(thread));
        if (again || softmax.moves) {
          if (softmax.is_first) release_queries();
          softmax.move_top(r_s, r_out, p.scale_log2);
        }
        if (softmax.add(r_s, reinterpret_cast<uint32_t*>(r_p.data()), p.scale_log2, again, own_barrier())) break;
      }
      release();

      wait_full();
      const auto r_v = value_mma.get_slice(thread).partition_fragment_B(
          make_tensor(make_smem_ptr(shared.tiles[ring.slot]), ColumnsByRows<kColumns>{}));
      warpgroup_fence_operand(r_p);
      warpgroup_fence_operand(r_out);
      const auto multiply = [&](auto steps) {
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < steps; ++i) gemm(value_mma, r_p(_, _, i), r_v(_, _, i), r_out);
        warpgroup_commit_batch();
      };
      keys > kShortBlock ? multiply(Int<kBlock / 16>{}) : multiply(Int<kShortBlock / 16>{});
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_out);
      release();
    }
    const Mark& mark = shared.marks[ring.slot];
    Bf16* s_out = shared.tiles[ring.slot];
    ring.advance();
    softmax.finish(p.scale_log2);
    if constexpr (kColumns == 64) use_operand(r_q);  // with 128 no register is free, and ptxas keeps them anyway
    if (read_for_warp(mark.is_shared) && !join_team(team, softmax, r_out, own_barrier() - 1, thread)) continue;
    store_result<kColumns>(softmax, r_out, mark, s_out, p, out_map, thread);
  }
  if (thread == 0) tma_store_wait_read();
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    block_sparse_attn_fwd_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                 const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kColumns>*>(shared_bytes);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    for (Stream<kColumns>& stream : shared.streams) {
      for (int i = 0; i < Stream<kColumns>::kSlots; ++i) {
        barrier_init(&stream.full[i], 1);
        barrier_init(&stream.empty[i], kWarpgroupThreads);
      }
    }
    fence_barrier_init();
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    launch_dependents();
  }
  __syncthreads();
  // The workers of one CTA are far apart in the order of blocks, so that the rest at the end is spread over the GPU.
  if (warpgroup < kStreams) {
    set_registers<kComputeRegisters, kStartRegisters>();
    compute(shared.streams[warpgroup], shared, p, out_map, thread);
  } else {
    set_registers<kCopyRegisters, kStartRegisters>();
    const int warp = __shfl_sync(~0u, thread / kWarpThreads, 0);
    if (warp < kStreams) {
      copy<kColumns>(shared.streams[warp], p, q_map, k_map, v_map, warp, thread % kWarpThreads);
    }
  }
}

}  // namespace dsa::block_sparse_attn_fwd
