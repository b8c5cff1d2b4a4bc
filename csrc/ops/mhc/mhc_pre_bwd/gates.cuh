// The gradients of the gates of a tile: each CTA sends its sums of dh_in times x, a few CTAs make the gradients from
// the sums of all, and each fetches them. CTAs with the same tokens usually run at once. A CTA that has waited for
// long, as other kernels keep some of the CTAs from starting, makes what it needs itself, with the same bits.
#pragma once

#include <cuda_bf16.h>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/messages.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

// dh_in times x over a chunk of columns, of which `x` and `dh_in` return the pieces.
template <class X, class DhIn>
__device__ __forceinline__ float sum_of_chunk(const X& x, const DhIn& dh_in) {
  float sums[2] = {};
#pragma unroll
  for (int piece = 0; piece < kChunkPieces; ++piece) {
    const Piece a = x(piece), b = dh_in(piece);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[piece % 2] += dot_bf16(a.words[j], b.words[j]);
  }
  return sums[0] + sums[1];
}

// A sum warp for each stream: sums over the CTA's columns. Two lanes have a token, and a chunk of the columns each.
template <int kStreams>
__device__ __forceinline__ void send_sums(ColumnStorage<kStreams>& shared, const Params& p, const Run& run, int stream,
                                          int lane) {
  static_assert(kChunks == 2 && kChunks * kTokens == kWarpThreads);
  const int t = lane % kTokens, chunk = lane / kTokens;
  Ring<Shape<kStreams>::kStages> ring;
  for (int i = 0; i < run.count; ++i, ring.advance()) {
    wait(&shared.full[ring.slot], ring.parity);
    const auto& tile = shared.tiles[ring.slot];
    const auto pieces_of = [&](const __nv_bfloat16* columns) {
      return [=](int piece) {
        return *reinterpret_cast<const Piece*>(reinterpret_cast<const char*>(columns) + swizzled_offset(t, piece));
      };
    };
    float sum = sum_of_chunk(pieces_of(tile.x[chunk][stream]), pieces_of(tile.dh_in[chunk]));
    sum += __shfl_down_sync(~0u, sum, kTokens);
    const int64_t row = (int64_t{run.tile(i)} * run.slices + run.slice) * kTokens + t;
    if (chunk == 0) send_message(p.sums + row * kStreams + stream, sum);
    // Gates may come from CTAs that go on alone: dx takes the place of x only when all sum warps have read it too. That
    // is certain only behind the message: ptxas moves an arrival in front of sums.
    __syncwarp();
    if (lane == 0) arrive(&shared.gates_full[ring.slot]);
  }
}

// Waits until all words of `received`, from `g` on in steps of `step` floats, have arrived; returns false if they do
// not. Called by all lanes of a warp. Words from `count` on are 0.
template <int kMessages, class Words>
__device__ __forceinline__ bool receive(const float* g, int64_t step, int count, int patience,
                                        Words (&received)[kMessages]) {
#pragma unroll 1
  for (int looks = 0; looks < patience; ++looks) {
    bool complete = true;
#pragma unroll
    for (int i = 0; i < kMessages; ++i) {
      received[i] = {};
      if (i < count) read_messages(g + i * step, received[i]);
    }
#pragma unroll
    for (const Words& words : received) complete &= have_arrived(words);
    if (__all_sync(~0u, complete)) return true;
  }
  return false;
}

// A turn of making gates: a few tokens of a tile. Each eight lanes of a warp have a quarter of the slices; lanes of the
// first eight have a stream of a token.
template <int kStreams>
struct Turn {
  static constexpr int kLanes = 8, kQuarters = kWarpThreads / kLanes;
  static constexpr int kTokensOfTurn = kLanes / kStreams, kTurns = kTokens / kTokensOfTurn;  // of a tile
  static constexpr int kSlices = (mhc::kMaxColumns / kColumns + kQuarters - 1) / kQuarters;  // of a lane, at most

  int tile, t, stream, quarter, slices;
  int64_t token;
  bool exists;

  __device__ __forceinline__ Turn(const Params& p, const Run& run, int tile, int index, int lane)
      : tile(tile),
        t(index * kTokensOfTurn + lane % kLanes / kStreams),
        stream(lane % kStreams),
        quarter(lane / kLanes),
        slices((run.slices + kQuarters - 1 - quarter) / kQuarters) {
    const int64_t at = int64_t{tile} * kTokens + t;
    exists = at < p.tokens, token = exists ? at : 0;
  }

  // Sums over the lane's slices; false if they do not arrive.
  __device__ __forceinline__ bool receive_sum(const Params& p, const Run& run, float& sum) const {
    constexpr int kStep = kTokens * kStreams;
    const float* const g_sums = p.sums + (int64_t{tile} * run.slices + quarter) * kStep + t * kStreams + stream;
    float received[kSlices];
    if (!receive(g_sums, kQuarters * kStep, slices, p.patience, received)) return false;
    sum = 0.f;
#pragma unroll
    for (const float part : received) sum += part;
    return true;
  }
  // The same from x and dh_in.
  __device__ __forceinline__ float compute_sum(const Params& p) const {
    const auto pieces_of = [&](const void* g, int64_t row, int slice, int chunk) {
      const auto* const columns = static_cast<const __nv_bfloat16*>(g) + row * p.columns + slice * kColumns;
      return [=](int piece) { return reinterpret_cast<const Piece*>(columns + chunk * kChunk)[piece]; };
    };
    float sum = 0.f;
    for (int i = 0; i < slices; ++i) {
      const int slice = quarter + i * kQuarters;
      float sums[kChunks];
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        sums[chunk] = sum_of_chunk(pieces_of(p.x, token * kStreams + stream, slice, chunk),
                                   pieces_of(p.dh_in, token, slice, chunk));
      }
      sum += sums[0] + sums[1];
    }
    return sum;
  }
};

// What a gate warp needs for a token and a stream, besides the sums: gates in the order of row_of_phi.
template <int kStreams>
struct Upstream {
  static constexpr int kOwn = kStreams + 2;

  float inv_rms, h_pre, along = 0.f;
  float dsum[kOwn], mix[kOwn];  // of the first one only the factor of the sum

  __device__ __forceinline__ Upstream(const Params& p, int64_t token, int stream) {
    constexpr int kMixed = Shape<kStreams>::kMixed;
    inv_rms = p.inv_rms[token], h_pre = p.h_pre[token * kStreams + stream];
    const float h_post = p.h_post[token * kStreams + stream], share = h_pre - p.eps;
    dsum[0] = share * (1.f - share);
    dsum[1] = p.dh_post[token * kStreams + stream] * h_post * (1.f - 0.5f * h_post);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) dsum[2 + i] = p.dh_res[(token * kStreams + stream) * kStreams + i];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) mix[i] = p.h_mix[token * kMixed + row_of_phi<kStreams>(stream * kOwn + i)];
  }
};

// Makes the gates of a turn and sends them. `sum_of_slices` gives a lane its sum, or returns false: then this does too.
template <int kStreams, class Sum>
__device__ __forceinline__ bool make_gates(const Params& p, const Turn<kStreams>& turn, const Sum& sum_of_slices) {
  using S = Shape<kStreams>;
  using T = Turn<kStreams>;
  constexpr int kMixed = S::kMixed, kOwn = kStreams + 2;
  const int stream = turn.stream;
  const bool sends = turn.quarter == 0, exists = turn.exists;
  const float alpha[] = {p.alpha[0], p.alpha[1], p.alpha[2]};
  Upstream<kStreams> given(p, turn.token, stream);
  const float scale = given.inv_rms * given.inv_rms * given.inv_rms / (kStreams * p.columns);

  // A row in scratch: all gates rounded, what rounding leaves, h_pre, the factor of x, zeros.
  float* const g_row = p.gates + (int64_t{turn.tile} * kTokens + turn.t) * (S::kPitch / 2);
  const auto send_pair = [&](int i) {
    float dh_mix[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float dmixed = alpha[min(i + j, 2)] * given.dsum[i + j];
      given.along = fmaf(dmixed, given.mix[i + j], given.along);
      dh_mix[j] = exists ? dmixed * given.inv_rms : 0.f;
    }
    const uint32_t high = pack_bf16(dh_mix[0], dh_mix[1]);
    const float2 rounded = unpack_bf16(high);
    float* const g_pair = g_row + (stream * kOwn + i) / 2;
    if (!sends) return;
    send_message(g_pair, __uint_as_float(high));
    send_message(g_pair + kMixed / 2, __uint_as_float(pack_bf16(dh_mix[0] - rounded.x, dh_mix[1] - rounded.y)));
  };
#pragma unroll
  for (int i = 2; i < kOwn; i += 2) send_pair(i);
  if (sends) {
    send_message(g_row + kMixed + stream, message_of(exists ? given.h_pre : 0.f));
    for (int i = kMixed + kStreams + 1 + stream; i < S::kPitch / 2; i += kStreams) send_message(g_row + i, 0.f);
  }

  float sum;
  if (!sum_of_slices(sum)) return false;
#pragma unroll
  for (int lanes = T::kLanes; lanes < kWarpThreads; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  given.dsum[0] *= sum;
  send_pair(0);
  float along = given.along;
#pragma unroll
  for (int lanes = 1; lanes < kStreams; lanes *= 2) along += __shfl_xor_sync(~0u, along, lanes);
  if (sends && stream == 0) send_message(g_row + kMixed + kStreams, message_of(exists ? along * scale : 0.f));
  if (!exists || !sends) return true;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float* const g_term = p.terms + int64_t{row_of_phi<kStreams>(stream * kOwn + i)} * p.tokens + turn.token;
    g_term[0] = given.dsum[i];
    g_term[int64_t{kMixed} * p.tokens] = given.dsum[i] * given.mix[i] * given.inv_rms;
  }
  return true;
}

// A gate warp. Those of all CTAs share the turns.
template <int kStreams>
__device__ __forceinline__ void take_turns(const Params& p, const Run& run, int warp, int lane) {
  constexpr int kTurns = Turn<kStreams>::kTurns;
  for (int i = warp * run.slices + run.slice; i < run.count * kTurns; i += kGateWarps * run.slices) {
    const Turn<kStreams> turn(p, run, run.tile(i / kTurns), i % kTurns, lane);
    if (!make_gates(p, turn, [&](float& sum) { return turn.receive_sum(p, run, sum); })) return;
  }
}

// The warp that fetches the gates of each tile, as soon as they are there and the stage is free.
template <int kStreams>
__device__ __forceinline__ void fetch_gates(ColumnStorage<kStreams>& shared, const Params& p, const Run& run,
                                            int lane) {
  using S = Shape<kStreams>;
  constexpr int kWords = kTokens * S::kPitch / 2, kMessages = (kWords / 4 - 1) / kWarpThreads + 1;
  const int count = (kWords / 4 - 1 - lane) / kWarpThreads + 1;
  bool alone = false;
  Ring<S::kStages> ring;
  for (int i = 0; i < run.count; ++i, ring.advance()) {
    wait(&shared.done[ring.slot], ring.parity ^ 1);
    const float* const g_gates = p.gates + int64_t{run.tile(i)} * kWords + lane * 4;
    float4 received[kMessages];
    alone = alone || !receive(g_gates, kWarpThreads * 4, count, p.patience, received);
    if (alone) {
#pragma unroll 1
      for (int index = 0; index < Turn<kStreams>::kTurns; ++index) {
        const Turn<kStreams> turn(p, run, run.tile(i), index, lane);
        make_gates(p, turn, [&](float& sum) { return sum = turn.compute_sum(p), true; });
      }
      while (!receive(g_gates, kWarpThreads * 4, count, kPatience, received)) {
      }
    }
    auto* const gates = reinterpret_cast<float4*>(shared.gates[ring.slot]) + lane;
#pragma unroll
    for (int k = 0; k < kMessages; ++k) {
      if (k < count) gates[k * kWarpThreads] = received[k];
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.gates_full[ring.slot]);
  }
}

}  // namespace dsa::mhc_pre_bwd
