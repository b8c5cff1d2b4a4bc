// The score warpgroup: keys and values, S^T = K Q^T, online softmax.
#pragma once

#include "keys.cuh"
#include "sm90/math.cuh"
#include "tiles/accumulators.cuh"
#include "tiles/online_softmax.cuh"

namespace dsa::sparse_mla_decode {

template <int kHeads>
using ScoreMma = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kHeads>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::K>()));

inline constexpr int kStepsOfChunk = 4;  // wgmma steps of 16 columns

// The registers through which keys pass: fragments of chunks of 64 columns, the operands of wgmma. A chunk of bf16 is
// loaded into its fragments three chunks ahead. A packed chunk is loaded four chunks ahead and unpacked one ahead.
template <Config kC>
struct KeyRegisters {
  static constexpr int kAhead = kC.is_packed ? 4 : 3, kBuffers = kC.is_packed ? 2 : 4;
  static constexpr bool kTail = tail_columns(kC) > 0;
  static constexpr int kTailBuffer = kBuffers - 1;  // of the last chunk, which is multiplied before and loaded after
  static constexpr int kTailByte = kC.is_packed ? kPackedColumns + kScaleBytes : 2 * kValueColumns;
  static_assert(kValueChunks % kAhead == 0 || !kC.is_packed, "a packed chunk always has the same registers");
  static_assert(kValueChunks % kBuffers == 0, "a chunk always has the same fragments");

  decltype(cute::make_tensor<Bf16>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kBuffers * kStepsOfChunk>>{})) r_k;
  uint4 packed[kC.is_packed ? kAhead : 1][2];
  float scales[2][kScaleGroups];  // of packed keys

  __device__ __forceinline__ uint32_t* fragments(int buffer) {
    return reinterpret_cast<uint32_t*>(r_k.data()) + buffer * kFragmentWords;
  }
  __device__ __forceinline__ void load_tail(const KeyRows<kC>& keys) {
    if constexpr (kTail) load_fragments(fragments(kTailBuffer), keys, kTailByte);
  }
  __device__ __forceinline__ void load_scales(const KeyRows<kC>& keys) {
    if constexpr (kC.is_packed) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 loaded = keys.scales(r);
        scales[r][0] = loaded.x, scales[r][1] = loaded.y, scales[r][2] = loaded.z, scales[r][3] = loaded.w;
      }
    }
  }
  __device__ __forceinline__ void load_chunk(const KeyRows<kC>& keys, int chunk) {
    if constexpr (kC.is_packed) {
#pragma unroll
      for (int r = 0; r < 2; ++r) packed[chunk % kAhead][r] = load_once(keys.g_rows[r] + chunk * kLoadBytes);
    } else {
      load_fragments(fragments(chunk % kBuffers), keys, chunk * kSwizzleRowBytes);
    }
  }
  // The loads that are in flight when a tile begins.
  __device__ __forceinline__ void begin(const KeyRows<kC>& keys) {
    load_tail(keys);
    load_scales(keys);
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) load_chunk(keys, chunk);
  }
};

// The keys of the tile whose score is computed, and of those after it.
template <Config kC>
struct KeyStream {
  const KernelParams& p;
  IdStream id_stream;
  int ids[2];        // of the tile after that of `keys`
  KeyRows<kC> keys;  // of the loads

  __device__ __forceinline__ explicit KeyStream(const KernelParams& p) : p(p), id_stream(p), keys(first_keys()) {
    id_stream.take(ids);
  }
  __device__ __forceinline__ KeyRows<kC> first_keys() {
    id_stream.take(ids);
    return KeyRows<kC>(p, ids);
  }
  // While the keys of a tile are loaded, those of the next one travel to L2.
  __device__ __forceinline__ void prefetch() const { KeyRows<kC>(p, ids).prefetch(); }
  // Continues with the loads of the next tile.
  __device__ __forceinline__ void advance() {
    const unsigned before = keys.visible;
    keys = KeyRows<kC>(p, ids);
    keys.visible |= before << 2;  // in the same register: there is no other
    id_stream.take(ids);
  }
  // After advance: which keys of the tile before are visible. Bit r is the r-th.
  __device__ __forceinline__ unsigned visible_before() const { return keys.visible >> 2; }
};

// Between two groups of columns with their own scales: S is the sum in units of the factor of group `group` - 1, and
// will be in those of `group`. Before the first and after the last group the unit is 1.
template <Config kC, class Accumulator>
__device__ __forceinline__ void change_units(const KeyRegisters<kC>& r, int group, Accumulator& r_s) {
  float ratios[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ratios[i] = group > 0 ? SplitScale(r.scales[i][group - 1]).factor : 1.f;
    if (group < kScaleGroups) {
      const float factor = SplitScale(r.scales[i][group]).factor, estimate = reciprocal_fast(factor);
      ratios[i] *= fmaf(fmaf(-estimate, factor, 1.f), estimate, estimate);
    }
  }
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(r_s);
#pragma unroll
  for (int i = 0; i < cute::size(r_s); ++i) r_s(i) *= ratios[i / 2 % 2];
}

// S^T = K Q^T of one tile. On the way the keys are stored as values to stage `slot`, and the first loads of the next
// tile begin.
template <Config kC, class Accumulator>
__device__ __forceinline__ void multiply_keys(SharedStorage<kC>& shared, KeyRegisters<kC>& r, Accumulator& r_s,
                                              KeyStream<kC>& stream, int slot) {
  using namespace cute;
  using R = KeyRegisters<kC>;
  constexpr int kGroupChunks = kScaleColumns / kChunkColumns;
  const uint32_t s_values = shared_address(shared.values[slot]);
  const int thread = warpgroup_thread();
  ScoreMma<kC.heads> mma;
  Tensor s_q = make_tensor(make_smem_ptr(shared.q), HeadsByColumns<kC.heads, kC.d_qk>{});
  Tensor r_q = mma.get_slice(thread).partition_fragment_B(s_q);
  const auto multiply_chunk = [&](int chunk, int buffer) {
    warpgroup_fence_operand(r_s);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStepsOfChunk; ++k) {
      gemm(mma, r.r_k(_, 0, buffer * kStepsOfChunk + k), r_q(_, 0, chunk * kStepsOfChunk + k), r_s(_, 0, 0));
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto unpack = [&](int chunk) {
    const int group = chunk / kGroupChunks;
    const uint32_t powers[2] = {SplitScale(r.scales[0][group]).power, SplitScale(r.scales[1][group]).power};
    unpack_fragments(r.fragments(chunk % R::kBuffers), r.packed[chunk % R::kAhead], powers);
  };
  const auto store_chunk = [&](int chunk) {
    store_values(s_values + chunk * kChunkBytes, r.fragments(chunk % R::kBuffers), thread);
  };
  const auto load_ahead = [&](int chunk) {
    if (chunk + R::kAhead == kValueChunks) stream.advance();
    r.load_chunk(stream.keys, (chunk + R::kAhead) % kValueChunks);
  };

  mma.accumulate_ = GMMA::ScaleOut::Zero;
  if constexpr (R::kTail) multiply_chunk(kValueChunks, R::kTailBuffer);
  if constexpr (kC.is_packed) unpack(0);
#pragma unroll
  for (int chunk = 0; chunk < kValueChunks; ++chunk) {
    store_chunk(chunk);
    if constexpr (kC.is_packed) {
      if (chunk % kGroupChunks == 0 && (R::kTail || chunk > 0)) change_units(r, chunk / kGroupChunks, r_s);
      load_ahead(chunk);
    }
    multiply_chunk(chunk, chunk % R::kBuffers);
    warpgroup_wait<1>();  // the product before has read its fragments
    if constexpr (!kC.is_packed) {
      load_ahead(chunk);
    } else if (chunk + 1 < kValueChunks) {
      unpack(chunk + 1);
    }
  }
  if constexpr (kC.is_packed) change_units(r, kScaleGroups, r_s);
  warpgroup_wait<0>();
  warpgroup_fence_operand(r_s);
  r.load_tail(stream.keys);
}

// The larger of a thread's two scores for the c-th of its heads.
template <class Accumulator>
__device__ __forceinline__ float top_of_column(const Accumulator& r_s, int c) {
  return fmaxf(r_s(c / 2 * 4 + c % 2), r_s(c / 2 * 4 + c % 2 + 2));
}

// Raises the running maxima of all heads to those over the warpgroup's keys, and publishes the factors that this means
// for O. Called by all threads of the warpgroup.
template <Config kC, class Accumulator, int kColumns>
__device__ __forceinline__ void raise_maxima(SharedStorage<kC>& shared, const Accumulator& r_s,
                                             float (&column_max)[kColumns], int thread) {
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float top = top_of_column(r_s, c);
#pragma unroll
    for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    if (lane < 4) shared.warp_tops[warp][column_in_row(c, lane)] = top;
  }
  sync_warpgroup<kScoreBarrier>();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int head = column_in_row(c, lane);
    float top = shared.warp_tops[0][head];
#pragma unroll
    for (int w = 1; w < kWarpsPerWarpgroup; ++w) top = fmaxf(top, shared.warp_tops[w][head]);
    top = raised_max(column_max[c], top);
    const int exponent = rescale_bits(column_max[c], top);
    if (thread < 4) shared.rescale[head] = exponent;
    if (thread < 4) shared.running_max[head] = top;
    column_max[c] = top;
  }
  sync_warpgroup<kScoreBarrier>();
}

// An element of an array in registers.
__device__ __forceinline__ float of_group(const float (&scales)[kScaleGroups], int group) {
  return group == 0 ? scales[0] : group == 1 ? scales[1] : group == 2 ? scales[2] : scales[3];
}

// P = 2^(S * scale - max), with a running maximum that may lag behind: for the value warpgroups, with what else they
// need.
template <Config kC, class Accumulator>
__device__ __forceinline__ void publish_probs(SharedStorage<kC>& shared, const KeyRegisters<kC>& r, Accumulator& r_s,
                                              float scale_log2, unsigned visible, uint32_t parity, int finished_item) {
  constexpr int kColumns = kC.heads / 4;  // heads of a thread's fragment of S^T
  const int thread = warpgroup_thread(), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  bool raise = false;
  float column_max[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    column_max[c] = shared.running_max[column_in_row(c, lane)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& s = r_s(c / 2 * 4 + 2 * i + c % 2);
      s = visible >> i & 1 ? s * scale_log2 : -INFINITY;
    }
    raise |= top_of_column(r_s, c) > column_max[c] + kRescaleStep;
  }
  wait(&shared.probs_read, parity);
  // This barrier also waits until no warp multiplies by Q any more, which the next item may replace.
  const bool raised = any_of_warpgroup(kScoreBarrier, raise);
  if (raised) raise_maxima(shared, r_s, column_max, thread);
  const int place = place_of_key(warp, lane);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int head = column_in_row(c, lane);
    const float base = column_max[c] == -INFINITY ? 0.f : column_max[c];
    const float2 probs{exp2_fast(r_s(c / 2 * 4 + c % 2) - base), exp2_fast(r_s(c / 2 * 4 + c % 2 + 2) - base)};
    *reinterpret_cast<float2*>(shared.probs + probs_offset(head, place)) = probs;
  }
  if (thread < 4) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int head = column_in_row(c, lane);
      if (!raised) shared.rescale[head] = kExponentOfOne;
      shared.row_max[head] = column_max[c];
    }
    if (thread == 0) shared.finished_item = finished_item;
  }
  if constexpr (kC.is_packed) {  // each of a key's four lanes writes the factors of one group
    const int group = lane % 4;
    *reinterpret_cast<float2*>(&shared.factors[group][place]) = {SplitScale(of_group(r.scales[0], group)).factor,
                                                                 SplitScale(of_group(r.scales[1], group)).factor};
  }
}

template <Config kC>
__device__ __forceinline__ void score(SharedStorage<kC>& shared, const KernelParams& p) {
  using namespace cute;
  Tensor r_s = partition_fragment_C(ScoreMma<kC.heads>{}, Shape<_64, Int<kC.heads>>{});
  KeyRegisters<kC> r;
  KeyStream<kC> stream(p);
  r.begin(stream.keys);

  unsigned tile = 0;  // of all items
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item(p, index);
    load_queries<kC>(shared, p, item);
    if (warpgroup_thread() < kC.heads) shared.running_max[warpgroup_thread()] = -INFINITY;
    fence_async_proxy();
    sync_warpgroup<kScoreBarrier>();
    for (int tiles_left = item.tiles; tiles_left > 0; --tiles_left, ++tile) {
      const int slot = tile % kStages;
      stream.prefetch();
      wait(&shared.empty[slot], tile / kStages % 2 ^ 1);
      multiply_keys(shared, r, r_s, stream, slot);
      publish_probs(shared, r, r_s, p.scale_log2, stream.visible_before(), tile % 2 ^ 1, tiles_left == 1 ? index : -1);
      fence_async_proxy();
      arrive(&shared.full[slot]);
      r.load_scales(stream.keys);
    }
  }
}

}  // namespace dsa::sparse_mla_decode
