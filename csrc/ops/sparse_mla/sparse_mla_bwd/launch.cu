// Launches the main kernel, for some or all queries, and the kernels that finish its sums.
#include <algorithm>

#include "finish.cuh"
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_bwd {
namespace {

unsigned blocks_of(int64_t items, int per_block) { return unsigned((items + per_block - 1) / per_block); }

template <int kConfig, bool kDeterministic>
const char* launch_main(const Params& p, int split_items, cudaStream_t stream) {
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
  return launch_kernel<sparse_mla_bwd_kernel<kConfig, kDeterministic>>(
      p.device, unsigned(p.whole_items + split_items * p.parts), kThreads, kBytes, stream, p, q_map, dout_map, dq_map);
}

// Launches dq of `queries` queries from `first_query` on, with their additions to dkv or, in a deterministic call,
// their rows of dkv.
template <bool kDeterministic>
const char* launch_queries(Params& p, int64_t first_query, int64_t queries, cudaStream_t stream) {
  const int64_t items_of_query = int64_t(p.groups) * head_blocks(p.heads, p.groups);
  const Plan plan = plan_items(queries * items_of_query, p.topk, p.num_sms);
  p.first_item = int(first_query * items_of_query);
  p.whole_items = int(plan.whole);
  p.parts = plan.parts;
  const int split_items = int(queries * items_of_query - plan.whole);
  const char* error = p.d_qk == 576 ? launch_main<0, kDeterministic>(p, split_items, stream)
                                    : launch_main<1, kDeterministic>(p, split_items, stream);
  if (error == nullptr && split_items > 0) {
    const int pairs = split_items * kBlockHeads * p.d_qk / 2;
    error = launch_kernel<combine_kernel>(p.device, blocks_of(pairs, kCombineThreads), kCombineThreads, 0, stream, p,
                                          pairs);
  }
  return error;
}

constexpr int kSlotThreads = 256;

// One thread per slot.
__global__ void __launch_bounds__(kSlotThreads) list_slots_kernel(const __grid_constant__ Params p, int slots) {
  const int i = blockIdx.x * kSlotThreads + threadIdx.x;
  if (i >= slots) return;
  const int blocks = head_blocks(p.heads, p.groups), slot = i % p.topk, row = i / p.topk, group = row % p.groups;
  const int query = p.first_item / (p.groups * blocks) + row / p.groups, b = query / p.seq_q, s = query % p.seq_q;
  const int id = p.indices[b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g + slot];
  const bool visible = slot < tiles::used_slots(p, b, s) && tiles::visible_ids(p, b, s).has(id);
  p.dkv.slot_keys[0][i] = visible ? (unsigned(b) * p.seq_kv + id) * p.groups + group : unsigned(p.dkv.keys);
  p.dkv.slot_rows[0][i] = unsigned(row) * blocks * p.topk + slot;
}

// All queries in one launch add to fp32 sums of dkv, which are rounded at the end.
const char* launch_adding(Params p, int64_t queries, cudaStream_t stream) {
  const char* error = key_sums::clear_sums(p.dkv, stream);
  if (error == nullptr && p.finished != nullptr) {
    const cudaError_t cleared = cudaMemsetAsync(p.finished, 0, sizeof(int), stream);
    if (cleared != cudaSuccess) error = cudaGetErrorString(cleared);
  }
  if (error == nullptr && queries > 0) error = launch_queries<false>(p, 0, queries, stream);
  if (error == nullptr) error = key_sums::round_sums(p.dkv, stream);
  return error;
}

// Alternates: launches as many queries as fit in the row buffer, then adds up their rows.
const char* launch_deterministic(Params p, int64_t queries, cudaStream_t stream) {
  const char* error = queries == 0 ? key_sums::clear_result(p.dkv, stream) : nullptr;
  for (int64_t first = 0; error == nullptr && first < queries; first += p.queries_at_once) {
    const int64_t taken = std::min(p.queries_at_once, queries - first);
    const int slots = static_cast<int>(taken * p.groups * p.topk);
    error = launch_queries<true>(p, first, taken, stream);
    if (error == nullptr && slots > 0) {
      error =
          launch_kernel<list_slots_kernel>(p.device, blocks_of(slots, kSlotThreads), kSlotThreads, 0, stream, p, slots);
    }
    if (error == nullptr) error = key_sums::sum_rows(p.dkv, slots, first == 0, first + taken == queries, stream);
  }
  return error;
}

}  // namespace

const char* launch(const Params& p, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const int64_t queries = p.heads > 0 ? int64_t(p.batch) * p.seq_q : 0;
  const char* error = p.deterministic ? launch_deterministic(p, queries, stream) : launch_adding(p, queries, stream);
  if (error == nullptr && p.attn_sink != nullptr) {
    error =
        launch_kernel<sink_kernel>(p.device, blocks_of(p.heads, kSinkHeads), dim3(kSinkHeads, kSinkRows), 0, stream, p);
  }
  return error;
}

}  // namespace dsa::sparse_mla_bwd
