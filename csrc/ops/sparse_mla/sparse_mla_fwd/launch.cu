// Selects the configuration and launches.
#include <algorithm>

#include "combine.cuh"
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mla_fwd {
namespace {

template <int kConfig, bool kMax>
const char* launch_config(const KernelParams& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  CUtensorMap q_map;
  if (!encode_head_tensor(&q_map, {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                                   group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b})) {
    return "no tensor map for q";
  }
  constexpr int kBytes = sizeof(SharedStorage<kConfigs[kConfig]>);
  static_assert(kBytes <= kMaxSharedBytes);
  const char* error = launch_kernel<sparse_mla_fwd_kernel<kConfig, kMax>>(p.device, std::min(p.items, p.num_sms),
                                                                          kThreads, kBytes, stream, p, q_map);
  if (error == nullptr && p.splits > 1) {
    error = launch_kernel<combine_kernel<kMax>>(p.device, unsigned(p.rows), kCombineThreads, 0, stream, p);
  }
  return error;
}

template <bool kMax>
const char* select_config(const KernelParams& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  const bool tail = p.d_qk == 576;
  if (group_heads <= 16) return tail ? launch_config<4, kMax>(p, stream) : launch_config<5, kMax>(p, stream);
  if (group_heads <= 32) return tail ? launch_config<2, kMax>(p, stream) : launch_config<3, kMax>(p, stream);
  return tail ? launch_config<0, kMax>(p, stream) : launch_config<1, kMax>(p, stream);
}

}  // namespace

const char* launch(const Params& params, const Maxima& maxima, void* stream) {
  const KernelParams p(params, maxima);
  const auto s = static_cast<cudaStream_t>(stream);
  return p.maxima.max_logits != nullptr ? select_config<true>(p, s) : select_config<false>(p, s);
}

}  // namespace dsa::sparse_mla_fwd
