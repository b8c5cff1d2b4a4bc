// Selects the configuration of the main kernel and launches it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mla_fwd {

// `KernelParams` may also be PagedParams or MergedParams.
template <int kConfig, bool kMax, class KernelParams>
const char* launch_config(const KernelParams& p, cudaStream_t stream, const HeadBox& q_box = {}) {
  const int group_heads = p.heads / p.groups;
  CUtensorMap q_map;
  if (!encode_head_tensor(&q_map,
                          {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                           group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b},
                          q_box)) {
    return "no tensor map for q";
  }
  constexpr int kBytes = sizeof(SharedStorage<config_of<KernelParams>(kConfig)>);
  static_assert(kBytes <= kMaxSharedBytes);
  const Grid grid(unsigned(std::min(p.items, p.num_sms)), 1, std::is_same_v<KernelParams, PagedParams>);
  return launch_kernel<sparse_mla_fwd_kernel<kConfig, kMax, KernelParams>>(p.device, grid, kThreads, kBytes, stream, p,
                                                                           q_map);
}

template <bool kMax, class KernelParams>
const char* launch_main(const KernelParams& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  const bool tail = p.d_qk == 576;
  if (group_heads <= 16) {
    return tail ? launch_config<4, kMax>(p, stream) : launch_config<5, kMax>(p, stream);
  }
  if (group_heads <= 32) {
    return tail ? launch_config<2, kMax>(p, stream) : launch_config<3, kMax>(p, stream);
  }
  return tail ? launch_config<0, kMax>(p, stream) : launch_config<1, kMax>(p, stream);
}

}  // namespace dsa::sparse_mla_fwd
