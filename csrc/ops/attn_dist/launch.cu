// Chooses the configuration and launches.
#include <algorithm>

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::attn_dist {
namespace {

template <int kConfig>
const char* launch_config(const Params& p, cudaStream_t stream) {
  constexpr Config kC = kConfigs[kConfig];
  const int group_heads = p.heads / p.groups;
  CUtensorMap q_map;
  if (!encode_head_tensor(&q_map,
                          {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                           group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b},
                          {.heads = kC.heads})) {
    return "no tensor map for q";
  }
  constexpr int kBytes = sizeof(SharedStorage<kC>);
  static_assert(kBytes <= 227 * 1024);
  const int items = p.batch * p.seq_q * p.groups;
  return launch_kernel<attn_dist_kernel<kConfig>>(p.device, unsigned(std::min(items, p.num_sms)), kThreads, kBytes,
                                                  stream, p, q_map);
}

// The first of four configurations of one width.
template <int kFirst>
const char* launch_heads(const Params& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  if (group_heads <= 16) return launch_config<kFirst>(p, stream);
  if (group_heads <= 32) return launch_config<kFirst + 1>(p, stream);
  if (group_heads <= 64) return launch_config<kFirst + 2>(p, stream);
  return launch_config<kFirst + 3>(p, stream);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.d_qk == 576 ? launch_heads<0>(p, s) : launch_heads<4>(p, s);
}

}  // namespace dsa::attn_dist
