// Chooses the configuration and launches: the main kernel, then what finishes its sums.
#include "bound.cuh"
#include "finish.cuh"
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mla_bwd {
namespace {

unsigned blocks_of(int64_t items, int per_block) { return unsigned((items + per_block - 1) / per_block); }

template <int kConfig, class Sum>
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
  const int split_items = p.batch * p.seq_q * p.groups * head_blocks - p.whole_items;
  const char* error = launch_kernel<sparse_mla_bwd_kernel<kConfig, Sum>>(
      p.device, unsigned(p.whole_items + split_items * p.parts), kThreads, kBytes, stream, p, q_map, dout_map, dq_map);
  if (error == nullptr && split_items > 0) {
    const int pairs = split_items * kBlockHeads * p.d_qk / 2;
    error = launch_kernel<combine_kernel>(p.device, blocks_of(pairs, kCombineThreads), kCombineThreads, 0, stream, p,
                                          pairs);
  }
  return error;
}

const char* clear(void* data, int64_t bytes, cudaStream_t stream) {
  if (data == nullptr || bytes == 0) return nullptr;
  const cudaError_t error = cudaMemsetAsync(data, 0, bytes, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class Sum>
const char* launch_all(const Params& p, cudaStream_t stream) {
  const int64_t keys = int64_t(p.batch) * p.seq_kv * p.groups, sums = keys * p.d_qk;
  const int64_t queries = p.heads > 0 ? int64_t(p.batch) * p.seq_q : 0;
  const char* error = clear(p.dkv_sum, sums * sizeof(Sum), stream);
  if (error == nullptr) error = clear(p.steps, sizeof(int), stream);
  if (error == nullptr) error = clear(p.addend_bound, sizeof(float), stream);
  if (error == nullptr) error = clear(p.lost_keys, keys, stream);
  if (error == nullptr && p.deterministic && keys > 0 && queries > 0) {
    error = launch_kernel<key_sizes_kernel>(p.device, blocks_of(keys, kBoundWarps), kBoundThreads, 0, stream, p, keys);
    if (error == nullptr) {
      error = launch_kernel<bound_kernel>(p.device, unsigned(queries * p.groups), kBoundThreads, 0, stream, p);
    }
  }
  if (error == nullptr && queries > 0) {
    error = p.d_qk == 576 ? launch_main<0, Sum>(p, stream) : launch_main<1, Sum>(p, stream);
  }
  if (error == nullptr && p.attn_sink != nullptr) {
    error =
        launch_kernel<sink_kernel>(p.device, blocks_of(p.heads, kSinkHeads), dim3(kSinkHeads, kSinkRows), 0, stream, p);
  }
  if (error == nullptr && sums > 0) {
    const int64_t pieces = sums / kCastColumns;
    error =
        launch_kernel<cast_kernel<Sum>>(p.device, blocks_of(pieces, kCastThreads), kCastThreads, 0, stream, p, pieces);
  }
  return error;
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.deterministic ? launch_all<FixedPoint>(p, s) : launch_all<float>(p, s);
}

}  // namespace dsa::sparse_mla_bwd
