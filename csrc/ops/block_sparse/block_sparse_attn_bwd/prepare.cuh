// What the gradients need: transposed lists, and the base and delta of each row. The first CTAs transpose lists of keys
// by query block into lists of queries by key block. Such a CTA has some key blocks of one head. Each warp, with a run
// of query blocks, counts who lists them and, once its offsets are known, writes in order. The other CTAs have rows.
#pragma once

#include <cfloat>

#include "ops/block_sparse/lists.cuh"
#include "params.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "tiles/softmax.cuh"
#include "tiles/visibility.cuh"

namespace dsa::block_sparse_attn_bwd {

using namespace dsa::block_sparse;
using namespace dsa::tiles;

inline constexpr int kPrepareWarps = 24, kPrepareThreads = kPrepareWarps * kWarpThreads;
inline constexpr int kRange = 64;     // key blocks per CTA
inline constexpr int kRowPasses = 2;  // of a CTA: so many rows are under way in each thread
// Marks a query after the last, in place of the base of its probabilities (base_of_lse). Its row of Q is 0, and 0 times
// an infinite key is NaN, so the probabilities of such a query are set to 0.
inline constexpr float kMissingBase = -FLT_MAX;

constexpr int ranges(int kv_blocks) { return (kv_blocks + kRange - 1) / kRange; }

// Rows of a CTA. A thread has 8 columns.
template <int kColumns>
constexpr int rows_per_cta() {
  return kRowPasses * kPrepareThreads / (kColumns / kPieceColumns);
}

// Calls found(row, slot, id) for the visible blocks that rows [begin, end) of a head list, row by row. Run by one warp,
// which reads several short lists at a time.
template <class Found>
__device__ __forceinline__ void for_listed_blocks(const Params& p, Item item, int begin, int end, const Found& found) {
  const int lane = threadIdx.x % kWarpThreads;
  if (p.slots <= kWarpThreads / 2) {
    const int width = max(p.slots, 1), rows = kWarpThreads / width, own = lane / width, slot = lane % width;
    for (int first = begin; first < end; first += rows) {
      item.block = first + own;
      const bool exists = own < rows && item.block < end && slot < p.slots;
      const int id = exists ? __ldg(listed_ids(p, item) + slot) : -1;
      const int count = exists ? __ldg(listed_number(p, item)) : 0;
      const bool is_visible = slot < count && valid_keys(p, id) > 0;
      for (int i = 0; i < rows; ++i) {
        if (is_visible && own == i) found(item.block, slot, id);
        __syncwarp();
      }
    }
    return;
  }
  constexpr int kAhead = 4;
  for (item.block = begin; item.block < end; ++item.block) {
    const List list = listed_blocks(p, item);
    for (int first = lane; first < list.count; first += kAhead * kWarpThreads) {
      int ids[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int slot = first + i * kWarpThreads;
        ids[i] = slot < list.count ? __ldg(list.g_ids + slot) : -1;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (valid_keys(p, ids[i]) > 0) found(item.block, first + i * kWarpThreads, ids[i]);
      }
    }
    __syncwarp();
  }
}

// Transposes lists of one head, for a range of key blocks.
__device__ __forceinline__ void transpose(const Params& p, int head_index, int first_block) {
  __shared__ int places[kPrepareWarps][kRange];  // counts, then the index of a warp's next entry
  __shared__ int sums[kRange];
  __shared__ int before;   // entries of blocks below the range
  __shared__ int longest;  // list
  const Item head(head_index * p.q_blocks, p.q_blocks, p.heads);
  const VisibleIds own{first_block, first_block + kRange};
  const int warp = threadIdx.x / kWarpThreads;
  const auto first_row = [&](int warp_index) {
    return static_cast<int>(static_cast<int64_t>(warp_index) * p.q_blocks / kPrepareWarps);
  };
  for (int i = threadIdx.x; i < kPrepareWarps * kRange; i += kPrepareThreads) places[i / kRange][i % kRange] = 0;
  if (threadIdx.x == 0) before = longest = 0;
  __syncthreads();

  int below = 0, last_slot = -1;
  for_listed_blocks(p, head, first_row(warp), first_row(warp + 1), [&](int, int slot, int id) {
    last_slot = max(last_slot, slot);
    below += id < first_block;
    if (own.has(id)) atomicAdd(&places[warp][id - first_block], 1);
  });
  below = __reduce_add_sync(~0u, below);
  last_slot = __reduce_max_sync(~0u, last_slot);
  if (threadIdx.x % kWarpThreads == 0) atomicAdd(&before, below), atomicMax(&longest, last_slot + 1);
  __syncthreads();
  if (threadIdx.x < kRange) {
    int sum = 0;
    for (int i = 0; i < kPrepareWarps; ++i) sum += places[i][threadIdx.x];
    sums[threadIdx.x] = sum;
  }
  if (first_block == 0 && threadIdx.x == 0) p.longest[head_index] = longest;
  __syncthreads();
  if (threadIdx.x < kRange) {
    int place = before;
    for (int i = 0; i < threadIdx.x; ++i) place += sums[i];
    int* g_offsets = p.offsets + static_cast<int64_t>(head_index) * (p.kv_blocks + 1) + first_block + threadIdx.x;
    if (first_block + threadIdx.x < p.kv_blocks) *g_offsets = place;
    for (int i = 0; i < kPrepareWarps; ++i) {
      const int count = places[i][threadIdx.x];
      places[i][threadIdx.x] = place;
      place += count;
    }
    if (first_block + threadIdx.x == p.kv_blocks - 1) g_offsets[1] = place;
  }
  __syncthreads();
  int* g_listing = p.listing + static_cast<int64_t>(head_index) * p.q_blocks * p.slots;
  // A block that a row lists twice takes two entries; their order does not matter, since their pairs are equal.
  for_listed_blocks(p, head, first_row(warp), first_row(warp + 1), [&](int row, int slot, int id) {
    if (own.has(id)) g_listing[atomicAdd(&places[warp][id - first_block], 1)] = row * p.slots + slot;
  });
}

// Of rows, those after the last of a head included: delta, the dot product of O and dO, less dlse; and the base of the
// probabilities.
template <int kColumns>
__device__ __forceinline__ void prepare_rows(const Params& p, int64_t first_of_cta) {
  constexpr int kRowThreads = kColumns / kPieceColumns, kStep = kPrepareThreads / kRowThreads;
  const int column = threadIdx.x % kRowThreads * kPieceColumns;
  const int blocks = p.batch * p.heads * p.q_blocks;
  const int first_block = static_cast<int>(first_of_cta / kBlock);
  const int first_row = static_cast<int>(first_of_cta % kBlock + threadIdx.x / kRowThreads);  // from there
  uint4 dout[kRowPasses], out[kRowPasses];
#pragma unroll
  for (int i = 0; i < kRowPasses; ++i) {
    const int row = first_row + i * kStep, index = first_block + row / kBlock;
    const Item item(index, p.q_blocks, p.heads);
    const int query = item.block * kBlock + row % kBlock;
    dout[i] = out[i] = {};
    if (index >= blocks || query >= p.seq_q) continue;
    const auto piece = [&](const Heads& of) {
      const auto* g_row = static_cast<const Bf16*>(of.data) + of.offset(item.batch, item.head, query);
      return reinterpret_cast<const uint4*>(g_row + column);
    };
    dout[i] = __ldg(piece(p.dout)), out[i] = __ldcs(piece(p.out));  // only dout is read again
  }
#pragma unroll
  for (int i = 0; i < kRowPasses; ++i) {
    const int row = first_row + i * kStep, index = first_block + row / kBlock;
    float delta = dot_bf16(dout[i].x, out[i].x) + dot_bf16(dout[i].y, out[i].y);
    delta += dot_bf16(dout[i].z, out[i].z) + dot_bf16(dout[i].w, out[i].w);
#pragma unroll
    for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    if (column > 0 || index >= blocks) continue;
    const Item item(index, p.q_blocks, p.heads);
    const int query = item.block * kBlock + row % kBlock;
    const bool exists = query < p.seq_q;
    if (exists && p.dlse != nullptr) delta -= __ldg(p.dlse + item.row(p) + query);
    float* g_rows = p.rows + static_cast<int64_t>(index) * 2 * kBlock + row % kBlock;
    g_rows[0] = exists ? base_of_lse(__ldg(p.lse + item.row(p) + query)) : kMissingBase;  // an lse of -inf makes P 0
    g_rows[kBlock] = delta;
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_kernel(const __grid_constant__ Params p) {
  launch_dependents();
  const int cta = static_cast<int>(blockIdx.x), transposing = p.batch * p.heads * ranges(p.kv_blocks);
  const int64_t first = static_cast<int64_t>(cta) * kPrepareThreads + threadIdx.x;
  for (int64_t i = first; i < number_of_counters(p); i += int64_t{gridDim.x} * kPrepareThreads) p.counters[i] = 0;
  if (cta < transposing) {
    transpose(p, cta / ranges(p.kv_blocks), cta % ranges(p.kv_blocks) * kRange);
  } else {
    // The first rows last: L2 still has their dout when the gradients begin.
    prepare_rows<kColumns>(p, int64_t{gridDim.x - 1 - blockIdx.x} * rows_per_cta<kColumns>());
  }
}

}  // namespace dsa::block_sparse_attn_bwd
