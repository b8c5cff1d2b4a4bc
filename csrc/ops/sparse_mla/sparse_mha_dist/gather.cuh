// The weights of the listed keys, from the sums of the tiles. A CTA has one row.
#pragma once

#include "ops/sparse_mla/sparse_mha/visible_keys.cuh"
#include "params.h"
#include "schedule.cuh"

namespace dsa::sparse_mha_dist {

inline constexpr int kGatherThreads = 256, kSlotsAtOnce = 8;  // of a thread

__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ Params p, const __grid_constant__ Lists lists) {
  const int batch = blockIdx.x / p.seq_q, query = blockIdx.x % p.seq_q;
  const int parts = query / kBlock < p.split.blocks ? p.split.parts : 1;
  const tiles::VisibleIds visible = visible_keys(lists, batch, query);
  const int* g_ids = lists.ids + batch * lists.ids_stride_b + query * lists.ids_stride_s;
  float* g_dist = p.dist + int64_t{blockIdx.x} * lists.topk;
#pragma unroll 1
  for (int first = threadIdx.x; first < lists.topk; first += kGatherThreads * kSlotsAtOnce) {
    int ids[kSlotsAtOnce];
    float weights[kSlotsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      const int slot = first + i * kGatherThreads;
      ids[i] = slot < lists.topk ? __ldg(g_ids + slot) : -1;
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float* g_sums = sums_of_row(p, batch, part, query);
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) {
        if (visible.has(ids[i])) weights[i] += __ldg(g_sums + ids[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      const int slot = first + i * kGatherThreads;
      if (slot < lists.topk) g_dist[slot] = weights[i];
    }
  }
}

}  // namespace dsa::sparse_mha_dist
