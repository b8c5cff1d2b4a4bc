// Packed keys, items of 16 or 32 heads ("narrow"): S^T = K Q^T and O^T += V^T P^T, with heads as columns, so that few
// heads cost little.
//
// Who does what, for tile j of an item:
//
//   warpgroup         waits on                       does                                         signals
//   score             full_front[j], full_back[j]    S^T = K Q^T; softmax
//                     probs_read of tile j-2         P^T, once for each group of columns          probs_written
//                                                    after the last tile: lse, factor of O        finished
//   value 0 (front)   probs_written                  O[:, 0:256) = O * rescale + P V              probs_read
//                                                    unpacks columns [0, 256) of tile j+2, loads  full_front[j+2]
//                                                    each key of tile j+3 to the registers of
//                                                    one that is unpacked
//   value 1 (back)    probs_written                  O[:, 256:512) = O * rescale + P V            probs_read
//                                                    the same of the other columns                full_back[j+2]
//   value 0, 1        finished                       scale and store O
//
// Unpacking overlaps with the products of values: with 16 heads it begins when they have been started. With 32 heads,
// whose products take longer, of a thread's four keys the first two are unpacked between them, the others after they
// have been started: one scale's columns of each key, and the other scale's when the products are complete.
//
// P is double-buffered, so that the scores of a tile need not wait for the values of the one before.
//
// The sums of S^T of each group of columns are kept apart until all of them are complete, and then multiplied by the
// group's scales, which are those of a row.
#pragma once

#include <cutlass/cutlass.h>

#include "narrow_feeder.cuh"
#include "narrow_queries.cuh"
#include "sm90/math.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/programmatic.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/columns.cuh"
#include "tiles/online_softmax.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mla_decode {

// Starts S^T = K Q^T of one tile: sums of each group of columns, and of the tail. The caller waits for them.
template <int kColumns, int kHeads, class Mma, class Sums>
__device__ __forceinline__ void multiply_keys(NarrowStorage<kColumns, kHeads>& shared, Mma& mma, Sums& r_sums, int slot,
                                              uint32_t parity, int thread) {
  using namespace cute;
  constexpr int kGroupSteps = kScaleColumns / kStepColumns, kTailSteps = (kColumns - kPackedColumns) / kStepColumns;
  Tensor s_k = make_tensor(make_smem_ptr(shared.tiles[slot]), RowsByColumns<kColumns>{});
  Tensor s_q = make_tensor(make_smem_ptr(shared.q), HeadsByColumns<kHeads, kColumns>{});
  Tensor r_k = mma.get_slice(thread).partition_fragment_A(s_k);
  Tensor r_q = mma.get_slice(thread).partition_fragment_B(s_q);
  const auto step_of_group = [&](int group, int k) {
    mma.accumulate_ = k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    gemm(mma, r_k(_, 0, group * kGroupSteps + k), r_q(_, 0, group * kGroupSteps + k), r_sums(_, 0, group));
  };
  warpgroup_fence_operand(r_sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    wait(half == 0 ? &shared.full_front[slot] : &shared.full_back[slot], parity);
    fence_async_proxy();
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kGroupSteps; ++k) {
      step_of_group(2 * half, k);
      step_of_group(2 * half + 1, k);
    }
    if (half == 1) {
#pragma unroll
      for (int k = 0; k < kTailSteps; ++k) step_of_group(kScaleGroups, k);
    }
    warpgroup_commit_batch();
  }
}

// Brings keys into L2, some tiles before they are loaded: the loads of a tile, of 42 KB, do not start before the former
// tile is unpacked. With 16 heads this gains nothing.
template <int kColumns, int kHeads>
struct Prefetcher {
  static constexpr bool kIsUsed = kHeads == 32;
  static constexpr int kTilesAhead = 3, kThreadsPerKey = 2, kLines = 3, kLineBytes = 128;
  static constexpr int kLastByte = packed_bytes(kColumns) - 1;
  static_assert(kWarpgroupThreads == kThreadsPerKey * kTileKeys && kLastByte < kThreadsPerKey * kLines * kLineBytes);
  const KernelParams& p;
  const int* g_ids;
  int left, id, first_line;

  __device__ __forceinline__ Prefetcher(const KernelParams& p, const Item& item, int thread)
      : p(p), first_line(thread % kThreadsPerKey * kLines) {
    const int first = (item.first_tile + kTilesAhead) * kTileKeys + thread / kThreadsPerKey;
    g_ids = item.indices(p) + first;
    left = item.slot_end - first;
    load_id();
  }

  __device__ __forceinline__ void load_id() {
    id = left > 0 ? __ldg(g_ids) : -1;
    g_ids += kTileKeys;
    left -= kTileKeys;
  }

  __device__ __forceinline__ void advance() {
    if constexpr (!kIsUsed) return;
    if (static_cast<unsigned>(id) < static_cast<unsigned>(p.slots)) {
      const char* g_key = p.key(id);
#pragma unroll
      for (int line = 0; line < kLines; ++line) prefetch_l2(g_key + min(kLastByte, (first_line + line) * kLineBytes));
    }
    load_id();
  }
};

// The end of an item: lse, and the factors that turn O into the output. column_sum is of a thread's keys only.
template <int kColumns, int kHeads, int kThreadHeads>
__device__ __forceinline__ void finish_heads(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p,
                                             const Item& item, int slot, const float (&column_max)[kThreadHeads],
                                             float (&column_sum)[kThreadHeads], int thread) {
  sum_columns<kScoreBarrier>(shared.of_warps, column_sum, thread);
  if (thread >= 4) return;
  const int heads_left = item.heads_left(p);
  const bool is_part = p.plan.splits > 1;
  float* g_lse = is_part ? p.partial_lse + item.split * p.rows : p.lse;
  const float empty_lse = is_part ? -INFINITY : p.empty_lse;
#pragma unroll
  for (int c = 0; c < kThreadHeads; ++c) {
    const int head = column_in_row(c, thread);
    const bool exists = head < heads_left, empty = column_sum[c] == 0.f;
    float denominator = column_sum[c];
    if (exists && p.attn_sink != nullptr && !is_part) {
      const float sink = p.attn_sink[(item.first_head(p) + head) * p.attn_sink_stride];
      denominator += exp2_fast(sink * kLog2E - column_max[c]);
    }
    if (exists) {
      g_lse[item.first_row(p) + head] = empty ? empty_lse : kLn2 * log_of_sum(column_max[c], log2f(column_sum[c]));
    }
    shared.finish[slot][head] = empty ? 0.f : 1.f / denominator;
  }
}

template <int kColumns, int kHeads>
__device__ __forceinline__ void score_narrow(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p,
                                             int thread) {
  using namespace cute;
  constexpr int kSums = kColumns > kPackedColumns ? kScaleGroups + 1 : kScaleGroups;
  constexpr int kThreadHeads = kHeads / 4;  // of a thread's fragment of S^T
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int row = warp * 16 + lane / 4;  // this thread's keys: this row and row + 8

  NarrowScoreMma<kHeads> mma;
  Tensor r_sums = partition_fragment_C(mma, Shape<_64, Int<kHeads * kSums>>{});  // (of a sum, 1, sums)
  Tensor r_s = partition_fragment_C(mma, Shape<_64, Int<kHeads>>{});
  Ring<kNarrowStages> at;
  Ring<kProbsStages> probs_at;
  Ring<kFinishStages> finish_at;

  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item(p, index);
    const float sums_scale = load_queries(shared, p, item, thread);
    fence_async_proxy();
    sync_warpgroup<kScoreBarrier>();

    float column_max[kThreadHeads], column_sum[kThreadHeads];  // column_sum is of this thread's keys only
#pragma unroll
    for (int c = 0; c < kThreadHeads; ++c) column_max[c] = -INFINITY, column_sum[c] = 0.f;
    Prefetcher<kColumns, kHeads> prefetcher(p, item, thread);
    for (int tiles_left = item.tiles; tiles_left > 0; --tiles_left) {
      prefetcher.advance();
      multiply_keys(shared, mma, r_sums, at.slot, at.parity, thread);
      float factors[2][kScaleGroups];
      bool visible[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        visible[r] = shared.visible[at.slot][row + 8 * r];
#pragma unroll
        for (int g = 0; g < kScaleGroups; ++g) factors[r][g] = scale_factor(shared.scales[at.slot][g][row + 8 * r]);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_sums);
#pragma unroll
      for (int i = 0; i < size(r_s); ++i) {
        const int r = i / 2 % 2;
        float sum = kSums > kScaleGroups ? r_sums(i, 0, kSums - 1) : 0.f;
#pragma unroll
        for (int g = 0; g < kScaleGroups; ++g) sum = fmaf(r_sums(i, 0, g), factors[r][g], sum);
        r_s(i) = visible[r] ? sum * sums_scale * p.scale_log2 : -INFINITY;
      }

      // P = 2^(S * scale - max), with a running maximum that may lag behind
      bool raise = false;
      float top[kThreadHeads];
#pragma unroll
      for (int c = 0; c < kThreadHeads; ++c) {
        top[c] = fmaxf(r_s(c / 2 * 4 + c % 2), r_s(c / 2 * 4 + c % 2 + 2));
        raise |= top[c] > column_max[c] + kRescaleStep;
      }
      int exponents[kThreadHeads];
#pragma unroll
      for (int c = 0; c < kThreadHeads; ++c) exponents[c] = kExponentOfOne;
      // This barrier also waits until no warp multiplies by Q any more, which the next item may replace.
      if (any_of_warpgroup(kScoreBarrier, raise)) {
        raise_maxima<kScoreBarrier>(shared.of_warps, top, column_max, column_sum, exponents, thread);
      }
#pragma unroll
      for (int c = 0; c < kThreadHeads; ++c) {
        const float base = column_max[c] == -INFINITY ? 0.f : column_max[c];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& s = r_s(c / 2 * 4 + 2 * r + c % 2);
          s = exp2_fast(s - base);
          column_sum[c] += s;
        }
      }
      wait(&shared.probs_read[probs_at.slot], probs_at.parity ^ 1);
      if (thread < 4) {
#pragma unroll
        for (int c = 0; c < kThreadHeads; ++c) shared.rescale[probs_at.slot][column_in_row(c, lane)] = exponents[c];
        if (thread == 0) shared.is_last_tile[probs_at.slot] = tiles_left == 1;
      }
#pragma unroll
      for (int g = 0; g < kScaleGroups; ++g) {
        Tensor r_p = make_fragment_like(r_s);
#pragma unroll
        for (int i = 0; i < size(r_s); ++i) r_p(i) = r_s(i) * factors[i / 2 % 2][g];
        store_transposed<kHeads>(shared_address(shared.probs[probs_at.slot][g]), r_p, thread);
      }
      fence_async_proxy();
      arrive(&shared.probs_written[probs_at.slot]);
      at.advance();
      probs_at.advance();
    }
    finish_heads(shared, p, item, finish_at.slot, column_max, column_sum, thread);
    arrive(&shared.finished[finish_at.slot]);
    finish_at.advance();
  }
}

// O of an item, times the factors of its heads.
template <bool kBack, int kHeads, class Output>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item, const Output& r_o) {
  const int thread = unsigned(thread_index()) % kWarpgroupThreads;
  const int64_t first_row = item.first_row(p);
  const int heads_left = item.heads_left(p);
  constexpr int kFirst = kBack * kValueColumns / 2;
  if (p.plan.splits > 1) {
    float* g_out = static_cast<float*>(p.partial_out) + (item.split * p.rows + first_row) * kValueColumns + kFirst;
    store_transposed_fp32<kHeads>(g_out, kValueColumns, heads_left, r_o, thread);
  } else {
    Bf16* g_out = static_cast<Bf16*>(p.out) + first_row * kValueColumns + kFirst;
    store_transposed_bf16<kHeads>(g_out, kValueColumns, heads_left, r_o, thread);
  }
}

template <int kColumns, int kHeads, bool kBack>
__device__ __forceinline__ void accumulate_narrow(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p) {
  using namespace cute;
  constexpr int kRows = kValueColumns / 2;  // of O^T, columns of O
  constexpr int kChunks = kRows / kChunkColumns, kGroups = kScaleGroups / 2;
  using Feeder = NarrowFeeder<kColumns, kHeads, kBack>;
  // Loads of each key that are unpacked before the products are awaited, as many as there are registers for; and keys
  // of which this happens between the products.
  constexpr int kLoads = Feeder::kLoads, kEarlyLoads = kHeads == 16 ? kLoads : kLoads / 2;
  constexpr int kKeysBetween = kHeads == 16 ? 0 : 2;
  constexpr int kBarrier = kBack ? kBackBarrier : kFrontBarrier;

  NarrowValueMma<kHeads> mma;
  Tensor r_o = partition_fragment_C(mma, Shape<Int<kRows>, Int<kHeads>>{});  // (of a chunk, chunks, 1)
  Feeder feeder(shared, p);
  Ring<kNarrowStages> at;
  Ring<kProbsStages> probs_at;
  Ring<kFinishStages> finish_at;
  const auto scale_heads = [&](const auto& factor) {
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      const float f = factor(column_of_value(i, unsigned(thread_index()) % kWarpThreads));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) r_o(i, chunk, 0) *= f;
    }
  };

  feeder.fill_stages();
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    bool is_last = false;
    while (!is_last) {
      Tensor s_v =
          make_tensor(make_smem_ptr(shared.tiles[at.slot] + kBack * kRows * kTileRows), ColumnsByRows<kRows>{});
      Tensor r_v = mma.get_slice(0).partition_fragment_A(s_v);
      wait(&shared.probs_written[probs_at.slot], probs_at.parity);
      is_last = read_for_warp(shared.is_last_tile[probs_at.slot]);
      const auto& rescale = shared.rescale[probs_at.slot];
      if (__any_sync(~0u, rescale[unsigned(thread_index()) % kHeads] != kExponentOfOne)) {
        scale_heads([&](int h) { return power_of_two(rescale[h]); });
      }
      // The tile that will replace this one. Keys are unpacked between the products without a branch: at the end of all
      // items for nothing. Pieces of the others are undefined there.
      const bool has_keys = feeder.has_keys;
      uint4 pieces[Feeder::kKeys][kLoads][2];
#pragma unroll
      for (int r = kKeysBetween; r < Feeder::kKeys; ++r) feeder.template leave_undefined<0, kEarlyLoads>(r, pieces);
      warpgroup_fence_operand(r_o);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kTileRows / kStepColumns; ++k) {
        if (0 < k && k <= kKeysBetween) feeder.template unpack_key<0, kEarlyLoads>(k - 1, pieces);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int group = (kBack ? kGroups : 0) + chunk / (kChunks / kGroups);
          Tensor s_p =
              make_tensor(make_smem_ptr(shared.probs[probs_at.slot][group]), HeadsByColumns<kHeads, kTileRows>{});
          Tensor r_p = mma.get_slice(0).partition_fragment_B(s_p);
          gemm(mma, r_v(_, chunk, k), r_p(_, 0, k), r_o(_, chunk, 0));
        }
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      // P tells that the scores are done: nobody reads the tail and the scales any more. Keys that are unpacked make
      // room for those of the next tile.
      if (has_keys) {
        feeder.store_notes(at.slot);
        feeder.find_key();
        const auto unpack_early = [&](auto after_key) {
#pragma unroll
          for (int r = 0; r < Feeder::kKeys; ++r) {
            if (r >= kKeysBetween) feeder.template unpack_key<0, kEarlyLoads>(r, pieces);
            after_key(r);
          }
        };
        // Two copies of it: a branch for each key takes 1 % longer.
        if (feeder.has_keys) {
          unpack_early([&](int r) { feeder.template load_key<0, kEarlyLoads>(r); });
        } else {
          unpack_early([](int) {});
        }
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(r_o);
      arrive(&shared.probs_read[probs_at.slot]);
      if (has_keys) {
        sync_warpgroup<kBarrier>();
        feeder.template store_keys<0, kEarlyLoads>(at.slot, pieces);
        feeder.template unpack_keys<kEarlyLoads, kLoads>(pieces);
        feeder.template store_keys<kEarlyLoads, kLoads>(at.slot, pieces);
        feeder.signal(at.slot);
        if (kEarlyLoads < kLoads) feeder.template load_keys<kEarlyLoads, kLoads>();
      }
      at.advance();
      probs_at.advance();
    }
    wait(&shared.finished[finish_at.slot], finish_at.parity);
    scale_heads([&](int h) { return shared.finish[finish_at.slot][h]; });
    finish_at.advance();
    store_output<kBack, kHeads>(p, Item(p, index), r_o);
  }
}

template <int kColumns, int kHeads>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    sparse_mla_decode_narrow_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_bytes_[];
  auto& shared = *reinterpret_cast<NarrowStorage<kColumns, kHeads>*>(shared_bytes_);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kNarrowStages; ++i) {
      barrier_init(&shared.full_front[i], kWarpgroupThreads);
      barrier_init(&shared.full_back[i], kWarpgroupThreads);
    }
    for (int i = 0; i < kProbsStages; ++i) {
      barrier_init(&shared.probs_written[i], kWarpgroupThreads);
      barrier_init(&shared.probs_read[i], 2 * kWarpgroupThreads);
    }
    for (uint64_t& barrier : shared.finished) barrier_init(&barrier, kWarpgroupThreads);
    fence_barrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_preceding_kernel();

  if (warpgroup == 0) {
    accumulate_narrow<kColumns, kHeads, false>(shared, p);
  } else if (warpgroup == 1) {
    accumulate_narrow<kColumns, kHeads, true>(shared, p);
  } else {
    score_narrow<kColumns, kHeads>(shared, p, thread);
  }
}

}  // namespace dsa::sparse_mla_decode
