// The gradients of the gates of a tile: each CTA sends its sums of dh_in times x, a few CTAs make the gradients from
// the sums of all, and each fetches them. All CTAs run at once, so that they can wait for each other's messages.
#pragma once

#include <cuda_bf16.h>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/messages.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"

namespace dsa::mhc_pre_bwd {

using namespace dsa::sm90;

// A sum warp for each stream: sums over the CTA's columns. Two lanes have a token, and a chunk of the columns each.
template <int kStreams>
__device__ __forceinline__ void send_sums(ColumnStorage<kStreams>& shared, const Params& p, const Run& run, int stream,
                                          int lane) {
  static_assert(kChunks * kTokens == kWarpThreads);
  const int t = lane % kTokens, chunk = lane / kTokens;
  Ring<Shape<kStreams>::kStages> ring;
  for (int i = 0; i < run.count; ++i, ring.advance()) {
    wait(&shared.full[ring.slot], ring.parity);
    const auto& tile = shared.tiles[ring.slot];
    float sums[2] = {};
#pragma unroll
    for (int piece = 0; piece < kChunkPieces; ++piece) {
      const auto read = [&](const __nv_bfloat16* chunk) {
        return *reinterpret_cast<const Piece*>(reinterpret_cast<const char*>(chunk) + swizzled_offset(t, piece));
      };
      const Piece x = read(tile.x[chunk][stream]), upstream = read(tile.dh_in[chunk]);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[piece % 2] += dot_bf16(x.words[j], upstream.words[j]);
    }
    float sum = sums[0] + sums[1];
    sum += __shfl_down_sync(~0u, sum, kTokens);
    const int64_t row = (int64_t{run.tile(i)} * run.slices + run.slice) * kTokens + t;
    if (chunk == 0) send_message(p.sums + row * kStreams + stream, sum);
  }
}

// Waits until all words of `received`, from `g` on in steps of `step` floats, have arrived. Called by all lanes of a
// warp. Words from `count` on are 0.
template <int kMessages, class Words>
__device__ __forceinline__ void receive(const float* g, int64_t step, int count, Words (&received)[kMessages]) {
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < kMessages; ++i) {
      received[i] = {};
      if (i < count) read_messages(g + i * step, received[i]);
    }
#pragma unroll
    for (const Words& words : received) complete &= have_arrived(words);
  } while (__any_sync(~0u, !complete));
}

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

// A gate warp. It takes turns with those of all CTAs: a turn is a few tokens of a tile. Each eight lanes have a quarter
// of the slices; lanes of the first eight have a stream of a token.
template <int kStreams>
__device__ __forceinline__ void make_gates(const Params& p, const Run& run, int warp, int lane) {
  using S = Shape<kStreams>;
  constexpr int kMixed = S::kMixed, kOwn = kStreams + 2, kLanes = 8, kQuarters = kWarpThreads / kLanes;
  constexpr int kTurnTokens = kLanes / kStreams, kTurns = kTokens / kTurnTokens;
  constexpr int kMessages = (mhc::kMaxColumns / kColumns + kQuarters - 1) / kQuarters;
  const int stream = lane % kStreams, quarter = lane / kLanes;
  const float alpha[] = {p.alpha[0], p.alpha[1], p.alpha[2]};
  for (int turn = warp * run.slices + run.slice; turn < run.count * kTurns; turn += kGateWarps * run.slices) {
    const int tile = run.tile(turn / kTurns), t = turn % kTurns * kTurnTokens + lane % kLanes / kStreams;
    const int64_t token = int64_t{tile} * kTokens + t;
    const bool exists = token < p.tokens;
    Upstream<kStreams> given(p, exists ? token : 0, stream);
    const float scale = given.inv_rms * given.inv_rms * given.inv_rms / (kStreams * p.columns);

    // A row in scratch: all gates rounded, what rounding leaves, h_pre, the factor of x, zeros.
    float* const g_row = p.gates + (int64_t{tile} * kTokens + t) * (S::kPitch / 2);
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
      if (quarter > 0) return;
      send_message(g_pair, __uint_as_float(high));
      send_message(g_pair + kMixed / 2, __uint_as_float(pack_bf16(dh_mix[0] - rounded.x, dh_mix[1] - rounded.y)));
    };
#pragma unroll
    for (int i = 2; i < kOwn; i += 2) send_pair(i);
    if (quarter == 0) {
      send_message(g_row + kMixed + stream, message_of(exists ? given.h_pre : 0.f));
      for (int i = kMixed + kStreams + 1 + stream; i < S::kPitch / 2; i += kStreams) send_message(g_row + i, 0.f);
    }

    float received[kMessages], sum = 0.f;
    constexpr int kStep = kTokens * kStreams;
    const float* const g_sums = p.sums + (int64_t{tile} * run.slices + quarter) * kStep + t * kStreams + stream;
    receive(g_sums, kQuarters * kStep, (run.slices + kQuarters - 1 - quarter) / kQuarters, received);
#pragma unroll
    for (const float part : received) sum += part;
#pragma unroll
    for (int lanes = kLanes; lanes < kWarpThreads; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    given.dsum[0] *= sum;
    send_pair(0);
    float along = given.along;
#pragma unroll
    for (int lanes = 1; lanes < kStreams; lanes *= 2) along += __shfl_xor_sync(~0u, along, lanes);
    if (quarter == 0 && stream == 0) {
      send_message(g_row + kMixed + kStreams, message_of(exists ? along * scale : 0.f));
    }
    if (!exists || quarter > 0) continue;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float* const g_term = p.terms + int64_t{row_of_phi<kStreams>(stream * kOwn + i)} * p.tokens + token;
      g_term[0] = given.dsum[i];
      g_term[int64_t{kMixed} * p.tokens] = given.dsum[i] * given.mix[i] * given.inv_rms;
    }
  }
}

// The warp that fetches the gates of each tile, as soon as they are there and the stage is free.
template <int kStreams>
__device__ __forceinline__ void fetch_gates(ColumnStorage<kStreams>& shared, const Params& p, const Run& run,
                                            int lane) {
  using S = Shape<kStreams>;
  constexpr int kWords = kTokens * S::kPitch / 2, kMessages = (kWords / 4 - 1) / kWarpThreads + 1;
  const int count = (kWords / 4 - 1 - lane) / kWarpThreads + 1;
  Ring<S::kStages> ring;
  for (int i = 0; i < run.count; ++i, ring.advance()) {
    wait(&shared.done[ring.slot], ring.parity ^ 1);
    float4 received[kMessages];
    receive(p.gates + int64_t{run.tile(i)} * kWords + lane * 4, kWarpThreads * 4, count, received);
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
