// What the gradients need: the base of each row, its delta (less dlse), and where the tiles of dS are.
#pragma once

#include "common.cuh"
#include "tiles/softmax.cuh"

namespace dsa::sparse_mha_bwd {

inline constexpr int kPrepareThreads = 256, kPrepareHeads = kPrepareThreads / kTileRows;

// Exclusive prefix sums, over the words of a batch, of how many bits of mask.tiles are set. Run by one CTA.
__device__ __forceinline__ void count_tiles(const Params& p, int batch) {
  __shared__ int of_warps[kPrepareThreads / kWarpThreads];
  const int words = p.mask.q_blocks * p.mask.tile_words;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const uint32_t* g_tiles = p.mask.tiles + int64_t{batch} * words;
  int* g_offsets = p.tile_offsets + int64_t{batch} * words;
  int before = 0;
  for (int first = 0; first < words; first += kPrepareThreads) {
    const int word = first + static_cast<int>(threadIdx.x);
    const int count = word < words ? __popc(__ldg(g_tiles + word)) : 0;
    const int to_lane = static_cast<int>(sum_to_lane(count));
    if (lane == kWarpThreads - 1) of_warps[warp] = to_lane;
    __syncthreads();
    int of_earlier = 0, all = 0;
    for (int i = 0; i < kPrepareThreads / kWarpThreads; ++i) {
      of_earlier += i < warp ? of_warps[i] : 0;
      all += of_warps[i];
    }
    if (word < words) g_offsets[word] = before + of_earlier + to_lane - count;
    before += all;
    __syncthreads();
  }
}

// 64 queries of kPrepareHeads heads.
__device__ __forceinline__ void prepare_rows(const Params& p, int batch, int tile, int first_head) {
  __shared__ float deltas[kPrepareHeads][kTileRows];
  constexpr int kRowThreads = kValueColumns / kPieceColumns, kRowsPerPass = kPrepareThreads / kRowThreads;
  constexpr int kAhead = 4;  // rows under way in each thread
  const int piece = threadIdx.x % kRowThreads;
  for (int first = threadIdx.x / kRowThreads; first < kPrepareThreads; first += kAhead * kRowsPerPass) {
    uint4 dout[kAhead], out[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = first + i * kRowsPerPass;
      const int head = first_head + row % kPrepareHeads, query = tile * kTileRows + row / kPrepareHeads;
      dout[i] = out[i] = {};
      if (head >= p.heads || query >= p.seq_q) continue;
      dout[i] = __ldg(reinterpret_cast<const uint4*>(row_of(p.dout, batch, query, head) + piece));
      out[i] = __ldg(reinterpret_cast<const uint4*>(row_of(p.out, batch, query, head) + piece));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = first + i * kRowsPerPass;
      float delta = dot_bf16(dout[i].x, out[i].x) + dot_bf16(dout[i].y, out[i].y);
      delta += dot_bf16(dout[i].z, out[i].z) + dot_bf16(dout[i].w, out[i].w);
#pragma unroll
      for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
      if (piece == 0) deltas[row % kPrepareHeads][row / kPrepareHeads] = delta;
    }
  }
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x) / kTileRows, head = first_head + own;
  const int row = threadIdx.x % kTileRows, query = tile * kTileRows + row;
  if (head >= p.heads) return;
  const bool exists = query < p.seq_q;
  const int64_t place = (int64_t{batch} * p.seq_q + query) * p.heads + head;
  const float lse = exists ? __ldg(p.lse + place) : -INFINITY;
  const float dlse = exists && p.dlse != nullptr ? __ldg(p.dlse + place) : 0.f;
  const int64_t index = (int64_t{batch} * p.heads + head) * p.mask.q_blocks * 2 + tile;
  float* g_rows = p.rows + index * 2 * kTileRows + row;
  g_rows[0] = base_of_lse(lse);  // an lse of -inf makes P 0
  g_rows[kTileRows] = deltas[own][row] - dlse;
}

constexpr int prepare_ctas(const Params& p) {
  return p.batch * (1 + 2 * p.mask.q_blocks * divide_up(p.heads, kPrepareHeads));
}

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ Params p) {
  const int index = static_cast<int>(blockIdx.x) - p.batch;
  if (index < 0) {
    count_tiles(p, blockIdx.x);
    return;
  }
  const int parts = (p.heads + kPrepareHeads - 1) / kPrepareHeads, tiles = p.mask.q_blocks * 2;
  prepare_rows(p, index / parts / tiles, index / parts % tiles, index % parts * kPrepareHeads);
}

}  // namespace dsa::sparse_mha_bwd
