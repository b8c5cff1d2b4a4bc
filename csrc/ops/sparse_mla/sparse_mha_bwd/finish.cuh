// dk_rope: the sum of its parts, in their order.
#pragma once

#include "common.cuh"

namespace dsa::sparse_mha_bwd {

inline constexpr int kFinishThreads = 256;

// Of how many groups of four values a thread has one.
constexpr int64_t finish_groups(const Params& p) { return int64_t{p.batch} * p.seq_kv * (kRope / 4); }

__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ Params p) {
  const int64_t groups = int64_t{p.batch} * p.seq_kv * (kRope / 4);
  const int64_t group = int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  if (group >= groups) return;
  const int parts = (p.heads + p.heads_together - 1) / p.heads_together;
  const auto* g_part = reinterpret_cast<const float4*>(p.dk_rope_parts) + group;
  float4 sum{};
#pragma unroll 8
  for (int i = 0; i < parts; ++i) {
    const float4 part = __ldcs(g_part + i * groups);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  static_cast<uint2*>(p.dk_rope)[group] =
      make_uint2(pack_bf16(sum.x * p.sm_scale, sum.y * p.sm_scale), pack_bf16(sum.z * p.sm_scale, sum.w * p.sm_scale));
}

}  // namespace dsa::sparse_mha_bwd
