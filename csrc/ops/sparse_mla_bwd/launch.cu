// Chooses the configuration and launches: the main kernel, then what finishes its sums.
#include "finish.cuh"
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mla_bwd {
namespace {

template <int kConfig>
const char* launch_main(const Params& p, cudaStream_t stream) {
  const int group_heads = p.heads / p.groups;
  const auto contiguous = [&](void* data, int columns) {
    const int64_t row = int64_t(p.heads) * columns;
    return HeadTensor{data,    columns,      group_heads, p.groups,
                      p.seq_q, p.batch,      columns,     int64_t(group_heads) * columns,
                      row,     p.seq_q * row};
  };
  CUtensorMap q_map, dout_map, dq_map;
  if (!encode_head_tensor(&q_map, {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                                   group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b})) {
    return "no tensor map for q";
  }
  if (!encode_head_tensor(&dout_map, contiguous(const_cast<void*>(p.dout), p.d_v))) return "no tensor map for dout";
  if (!encode_head_tensor(&dq_map, contiguous(p.dq, p.d_qk))) return "no tensor map for dq";
  constexpr int kBytes = sizeof(SharedStorage<kConfigs[kConfig]>);
  static_assert(kBytes <= kMaxSharedBytes);
  const int head_blocks = (group_heads + kBlockHeads - 1) / kBlockHeads;
  const unsigned grid = unsigned(p.batch) * p.seq_q * p.groups * head_blocks;
  return launch_kernel<sparse_mla_bwd_kernel<kConfig>>(p.device, grid, kThreads, kBytes, stream, p, q_map, dout_map,
                                                       dq_map);
}

}  // namespace

const char* launch(const Params& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int64_t sums = int64_t(p.batch) * p.seq_kv * p.groups * p.d_qk;
  cudaError_t cleared = cudaMemsetAsync(p.dkv_sum, 0, sums * sizeof(float), stream);
  if (cleared == cudaSuccess && p.sweep != nullptr) cleared = cudaMemsetAsync(p.sweep, 0, sizeof(int), stream);
  if (cleared != cudaSuccess) return cudaGetErrorString(cleared);

  const char* error = nullptr;
  if (p.batch > 0 && p.seq_q > 0) error = p.d_qk == 576 ? launch_main<0>(p, stream) : launch_main<1>(p, stream);
  if (error == nullptr && p.attn_sink != nullptr) {
    const unsigned blocks = (p.heads + kSinkHeads - 1) / kSinkHeads;
    error = launch_kernel<sink_kernel>(p.device, blocks, dim3(kSinkHeads, kSinkRows), 0, stream, p);
  }
  if (error == nullptr && sums > 0) {
    const int64_t pieces = sums / kScatterColumns;
    const unsigned blocks = unsigned((pieces + kCastThreads - 1) / kCastThreads);
    error = launch_kernel<cast_kernel>(p.device, blocks, kCastThreads, 0, stream, p, pieces);
  }
  return error;
}

}  // namespace dsa::sparse_mla_bwd
