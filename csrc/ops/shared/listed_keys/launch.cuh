// Selects the template instance for a shape and launches it.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::listed_keys {

template <int kKeyColumns, int kHeads, class Function, bool kUnmerged = false>
const char* launch_items(const ParamsOf<Config{kKeyColumns, kHeads, kUnmerged}>& p, int items, cudaStream_t stream) {
  constexpr Config kC{kKeyColumns, kHeads, kUnmerged};
  const int group_heads = p.heads / p.groups;
  CUtensorMap q_map;
  if (!encode_head_tensor(&q_map,
                          {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                           group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b},
                          {.heads = kHeads})) {
    return "no tensor map for q";
  }
  constexpr int kBytes = sizeof(SharedStorage<kC>);
  static_assert(kBytes <= 227 * 1024);
  return launch_kernel<listed_keys_kernel<kKeyColumns, kHeads, Function, kUnmerged>>(
      p.device, unsigned(std::min(items, p.num_sms)), kC.threads(), kBytes, stream, p, q_map);
}

template <int kKeyColumns, int kHeads, class Function>
const char* launch_instance(const Params& params, cudaStream_t stream) {
  const int queries = params.batch * params.seq_q * params.groups, tiles = (params.topk - 1) / kTileKeys + 1;
  // A row is divided by the sum over all its tiles.
  const KernelParams p{params, plan_rounds(queries, tiles, params.num_sms, !params.normalize)};
  return launch_items<kKeyColumns, kHeads, Function>(p, p.rounds.items(queries), stream);
}

// For up to kHeads heads per group.
template <int kKeyColumns, int kHeads, class Function>
const char* launch_config(const Params& p, cudaStream_t stream) {
  return p.heads / p.groups < kHeads ? launch_instance<kKeyColumns, kHeads, Partial<Function>>(p, stream)
                                     : launch_instance<kKeyColumns, kHeads, Function>(p, stream);
}

// For up to 64 heads per group.
template <int kKeyColumns, class Function>
const char* launch_heads(const Params& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  if (group_heads <= 16) return launch_config<kKeyColumns, 16, Function>(p, stream);
  if (group_heads <= 32) return launch_config<kKeyColumns, 32, Function>(p, stream);
  return launch_config<kKeyColumns, 64, Function>(p, stream);
}

}  // namespace dsa::listed_keys
