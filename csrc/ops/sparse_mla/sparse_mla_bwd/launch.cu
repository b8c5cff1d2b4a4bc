// Launches the main kernel, for some or all queries, and the kernels that finish its sums.
#include <algorithm>

#include "finish.cuh"
#include "kernel.cuh"
#include "launches.h"
#include "params.h"
#include "sm90/launch.h"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_bwd {
namespace {

unsigned blocks_of(int64_t items, int per_block) { return unsigned((items + per_block - 1) / per_block); }

template <int kConfig, bool kDeterministic>
const char* launch_config(const Params& p, int64_t ctas, cudaStream_t stream) {
  constexpr Config kC = kConfigs[kConfig];
  constexpr int kBytes = sizeof(SharedStorage<kC>);
  static_assert(kBytes <= kMaxSharedBytes);
  MergedMaps maps;
  auto& [query, run] = maps.kinds;
  const char* error = encode_maps(query, p, kBlockHeads, 1);
  if constexpr (kC.merged) {
    if (error == nullptr) error = encode_maps(run, p, kBlockHeads / p.lists.queries, p.lists.queries);
    if (error != nullptr) return error;
    return launch_kernel<sparse_mla_bwd_merged_kernel<kConfig>>(p.device, unsigned(ctas), kThreads, kBytes, stream, p,
                                                                maps);
  } else {
    if (error != nullptr) return error;
    const auto launch = [&](auto with_dist) {
      return launch_kernel<sparse_mla_bwd_kernel<kConfig, kDeterministic, with_dist>>(
          p.device, unsigned(ctas), kThreads, kBytes, stream, p, query.q, query.dout, query.dq);
    };
    return p.dist == nullptr ? launch(std::false_type{}) : launch(std::true_type{});
  }
}

// The main kernel, and the sums of dq of at most `split_items` split items.
template <bool kMerged, bool kDeterministic>
const char* launch_main(const Params& p, int64_t ctas, int split_items, cudaStream_t stream) {
  const char* error = p.d_qk == 576 ? launch_config<config_index(576, kMerged), kDeterministic>(p, ctas, stream)
                                    : launch_config<config_index(512, kMerged), kDeterministic>(p, ctas, stream);
  if (error != nullptr || split_items == 0) return error;
  const int pairs = split_items * kBlockHeads * p.d_qk / 2;
  return launch_kernel<combine_kernel<kMerged>>(p.device, blocks_of(pairs, kCombineThreads), kCombineThreads, 0, stream,
                                                p, pairs);
}

// Launches dq of `queries` queries from `first_query` on, with their additions to dkv or, in a deterministic call,
// their rows of dkv.
template <bool kDeterministic>
const char* launch_queries(Params& p, int64_t first_query, int64_t queries, cudaStream_t stream) {
  p.first_item = int(first_query * p.groups);
  if (p.pairs) return launch_pairs(p, queries, stream);
  const Plan plan = plan_items(queries * p.groups, p.topk, p.num_sms);
  p.whole_items = int(plan.whole);
  p.parts = plan.parts;
  const int split_items = int(queries * p.groups - plan.whole);
  return launch_main<false, kDeterministic>(p, plan.whole + split_items * plan.parts, split_items, stream);
}

constexpr int kSlotThreads = 256;

// One thread per slot.
__global__ void __launch_bounds__(kSlotThreads) list_slots_kernel(const __grid_constant__ Params p, int slots) {
  const int i = blockIdx.x * kSlotThreads + threadIdx.x;
  if (i >= slots) return;
  const int slot = i % p.topk, item = p.first_item + i / p.topk, group = item % p.groups;
  const int query = item / p.groups, b = query / p.seq_q, s = query % p.seq_q;
  const int id = p.indices[b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g + slot];
  const bool visible = slot < tiles::used_slots(p, b, s) && tiles::visible_ids(p, b, s).has(id);
  p.dkv.slot_keys[0][i] = visible ? (unsigned(b) * p.seq_kv + id) * p.groups + group : unsigned(p.dkv.keys);
  p.dkv.slot_rows[0][i] = unsigned(i);
}

const char* clear_finished(const Params& p, cudaStream_t stream) {
  if (p.finished == nullptr) return nullptr;
  const cudaError_t cleared = cudaMemsetAsync(p.finished, 0, sizeof(int), stream);
  return cleared == cudaSuccess ? nullptr : cudaGetErrorString(cleared);
}

// All queries add to fp32 sums of dkv: in one launch, or in as many as dS of pairs needs.
const char* launch_adding(Params p, int64_t queries, cudaStream_t stream) {
  const char* error = nullptr;
  for (int64_t first = 0; error == nullptr && first < queries; first += p.queries_at_once) {
    error = clear_finished(p, stream);
    if (error == nullptr) {
      error = launch_queries<false>(p, first, std::min(p.queries_at_once, queries - first), stream);
    }
  }
  return error;
}

// The same with merged lists, in as many launches as entries need.
const char* launch_merging(Params p, cudaStream_t stream) {
  const int64_t runs = merged_lists::runs_of_call(p.batch, p.seq_q, p.groups, p.lists.queries);
  const int64_t runs_at_once = p.lists.runs;
  const char* error = nullptr;
  for (int64_t first = 0; error == nullptr && first < runs; first += runs_at_once) {
    p.lists.first_run = int(first);
    p.lists.runs = int(std::min(runs_at_once, runs - first));
    error = merged_lists::merge(p, p.lists, p.conditions, stream);
    if (error == nullptr) error = clear_finished(p, stream);
    if (error == nullptr) {
      const int64_t ctas = most_ctas(int64_t{p.lists.runs} * p.lists.queries, p.num_sms);
      error = launch_main<true, false>(p, ctas, p.num_sms - 1, stream);
    }
  }
  return error;
}

// Adds to fp32 sums of dkv, which are rounded at the end.
const char* launch_summing(const Params& p, int64_t queries, cudaStream_t stream) {
  const char* error = key_sums::clear_sums(p.dkv, stream);
  if (error == nullptr) error = p.merged ? launch_merging(p, stream) : launch_adding(p, queries, stream);
  return error == nullptr ? key_sums::round_sums(p.dkv, stream) : error;
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
  const char* error = p.deterministic ? launch_deterministic(p, queries, stream) : launch_summing(p, queries, stream);
  if (error == nullptr && p.attn_sink != nullptr) {
    error =
        launch_kernel<sink_kernel>(p.device, blocks_of(p.heads, kSinkHeads), dim3(kSinkHeads, kSinkRows), 0, stream, p);
  }
  return error;
}

}  // namespace dsa::sparse_mla_bwd
