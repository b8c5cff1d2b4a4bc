// The last steps: dkv from its sums, and the gradient of the sinks.
#pragma once

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/scatter.cuh"
#include "storage.cuh"

namespace dsa::sparse_mla_bwd {

inline constexpr int kCastThreads = 256, kCastColumns = 8;

// One thread for each 8 columns of a key: rounds the sums and puts their columns in order.
__global__ void __launch_bounds__(kCastThreads) cast_kernel(const __grid_constant__ Params p, int64_t pieces) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kCastThreads + threadIdx.x;
  if (piece >= pieces) return;
  const int first = piece * kCastColumns % sm90::kScatterColumns;
  const float* g_sums = p.dkv_sum + piece * kCastColumns - first;
  const auto pair = [&](int i) {
    return sm90::pack_bf16(g_sums[sm90::summed_place(first + i)], g_sums[sm90::summed_place(first + i + 1)]);
  };
  static_cast<uint4*>(p.dkv)[piece] = {pair(0), pair(2), pair(4), pair(6)};
}

inline constexpr int kRowColumns = 8, kSumKeys = 4;

// Deterministic calls: one thread for each 8 columns of a key, kSumKeys keys a block. Adds up the rows of a launch in
// the order of their slots, after the sums of earlier launches; the last rounds and puts the columns in order.
__global__ void __launch_bounds__(kSumKeys * 576 / kRowColumns)
    sum_rows_kernel(const __grid_constant__ Params p, int64_t keys, bool is_first, bool is_last) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kSumKeys + threadIdx.y;
  if (key >= keys) return;
  const unsigned begin = p.key_starts[key], end = p.key_starts[key + 1];
  if (begin == end && !is_first && !is_last) return;
  const int row_pieces = p.d_qk / kRowColumns, piece = threadIdx.x, blocks = head_blocks(p.heads, p.groups);
  float4* g_sums = reinterpret_cast<float4*>(p.dkv_sum + key * p.d_qk) + 2 * piece;
  float4 low = {}, high = {};
  if (!is_first) low = g_sums[0], high = g_sums[1];
  const uint4* g_pieces = static_cast<const uint4*>(p.dkv_rows) + piece;
  const auto add = [](float& a, float& b, uint32_t pair) {
    a += __uint_as_float(pair << 16);
    b += __uint_as_float(pair & 0xffff0000u);
  };
  for (int block = 0; block < blocks; ++block) {
#pragma unroll 8
    for (unsigned i = begin; i < end; ++i) {
      const int64_t row = p.slot_rows[1][i] + static_cast<int64_t>(block) * p.topk;
      const uint4 pairs = __ldcs(g_pieces + row * row_pieces);
      add(low.x, low.y, pairs.x), add(low.z, low.w, pairs.y);
      add(high.x, high.y, pairs.z), add(high.z, high.w, pairs.w);
    }
  }
  if (!is_last) {
    g_sums[0] = low, g_sums[1] = high;
    return;
  }
  const int place = piece * kRowColumns % sm90::kScatterColumns;
  uint32_t* g_key = static_cast<uint32_t*>(p.dkv) + (key * p.d_qk + piece * kRowColumns - place) / 2;
  g_key[sm90::stored_column(place) / 2] = sm90::pack_bf16(low.x, low.y);
  g_key[sm90::stored_column(place + 2) / 2] = sm90::pack_bf16(low.z, low.w);
  g_key[sm90::stored_column(place + 4) / 2] = sm90::pack_bf16(high.x, high.y);
  g_key[sm90::stored_column(place + 6) / 2] = sm90::pack_bf16(high.z, high.w);
}

inline constexpr int kCombineThreads = 256;

// One thread for each 2 columns of a row of an item that was split: the sum of its parts.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params p, int pairs) {
  const int pair = blockIdx.x * kCombineThreads + threadIdx.x, row_pairs = p.d_qk / 2;
  if (pair >= pairs) return;
  const int column = pair % row_pairs * 2, row = pair / row_pairs % kBlockHeads, split = pair / row_pairs / kBlockHeads;
  const Item item(p, p.whole_items + split * p.parts);
  if (row >= item.heads_left(p)) return;
  const float* g_part = p.dq_parts + (int64_t{split} * p.parts * kBlockHeads + row) * p.d_qk + column;
  float2 sum = {0.f, 0.f};
  for (int part = 0; part < p.parts; ++part, g_part += kBlockHeads * p.d_qk) {
    const float2 value = *reinterpret_cast<const float2*>(g_part);
    sum.x += value.x, sum.y += value.y;
  }
  static_cast<uint32_t*>(p.dq)[((item.first_row(p) + row) * p.d_qk + column) / 2] = sm90::pack_bf16(sum.x, sum.y);
}

inline constexpr int kSinkHeads = 32, kSinkRows = 32;  // of one block

// The sum of each head's sink terms, always in the same order.
__global__ void __launch_bounds__(kSinkHeads* kSinkRows) sink_kernel(const __grid_constant__ Params p) {
  __shared__ float s_sums[kSinkRows][kSinkHeads];
  const int head = blockIdx.x * kSinkHeads + threadIdx.x;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seq_q;
  float sum = 0.f;
  if (head < p.heads) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kSinkRows) sum += p.sink_terms[row * p.heads + head];
  }
  s_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || head >= p.heads) return;
  for (int i = 1; i < kSinkRows; ++i) sum += s_sums[i][threadIdx.x];
  p.d_sink[head] = sum;
}

}  // namespace dsa::sparse_mla_bwd
