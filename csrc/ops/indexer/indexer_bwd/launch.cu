// Launches the merge of each group's lists, the main kernel, and the sums of dk.
#include <algorithm>

#include "kernel.cuh"
#include "merge.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::indexer_bwd {
namespace {

const char* launch_merge(const Params& p, int groups, cudaStream_t stream) {
  if (p.starts != nullptr) {
    const int blocks = std::max(1, (p.capacity + kEntryThreads - 1) / kEntryThreads);
    return launch_kernel<list_ranges_kernel>(p.device, unsigned(groups * blocks), kEntryThreads, 0, stream, p, blocks);
  }
  const int queries = queries_of_group(p.heads), warps = std::clamp(kMergeWarpsPerQuery * queries, 1, kMaxMergeWarps);
  const int bytes = merge_arrays(queries) * merge_words(queries, p.seq_kv) * int(sizeof(unsigned));
  return launch_kernel<merge_lists_kernel>(p.device, unsigned(groups), 32 * warps, bytes, stream, p);
}

template <int kColumns, int kHeads, bool kDeterministic>
const char* launch_config(const Params& p, int groups, cudaStream_t stream) {
  const HeadTensor q{p.q, p.dim, p.heads, 1, p.seq, 1, p.q_stride_h, 0, p.q_stride_s, 0};
  const HeadTensor dq{p.dq, p.dim, p.heads, 1, p.seq, 1, p.dim, 0, int64_t(p.heads) * p.dim, 0};
  CUtensorMap q_map, dq_map;
  if (!encode_head_tensor(&q_map, q, {.heads = kHeads, .positions = kRows / kHeads})) return "no tensor map for q";
  if (!encode_head_tensor(&dq_map, dq, {.heads = kHeads, .positions = kWarpgroupRows / kHeads})) {
    return "no tensor map for dq";
  }
  constexpr int kBytes = sizeof(SharedStorage<kColumns, kHeads>);
  static_assert(kBytes <= 227 * 1024);
  return launch_kernel<indexer_bwd_kernel<kColumns, kHeads, kDeterministic>>(
      p.device, unsigned(std::min(groups, p.num_sms)), kThreads, kBytes, stream, p, q_map, dq_map);
}

template <int kColumns, bool kDeterministic>
const char* launch_heads(const Params& p, int groups, cudaStream_t stream) {
  switch (p.heads) {
    case 8:
      return launch_config<kColumns, 8, kDeterministic>(p, groups, stream);
    case 16:
      return launch_config<kColumns, 16, kDeterministic>(p, groups, stream);
    case 32:
      return launch_config<kColumns, 32, kDeterministic>(p, groups, stream);
    default:
      return launch_config<kColumns, 64, kDeterministic>(p, groups, stream);
  }
}

template <bool kDeterministic>
const char* launch_main(const Params& p, int groups, cudaStream_t stream) {
  return p.dim == 128 ? launch_heads<128, kDeterministic>(p, groups, stream)
                      : launch_heads<64, kDeterministic>(p, groups, stream);
}

// Launches dq and dweights of some groups, with their additions to dk or, in a deterministic call, dk's rows and sums.
const char* launch_groups(const Params& p, int groups, bool is_first, bool is_last, cudaStream_t stream) {
  const char* error = launch_merge(p, groups, stream);
  if (error != nullptr || !p.deterministic) return error != nullptr ? error : launch_main<false>(p, groups, stream);
  error = launch_main<true>(p, groups, stream);
  const int slots = groups * p.capacity;
  if (error == nullptr) {
    error = launch_kernel<list_slots_kernel>(p.device, unsigned((slots + kEntryThreads - 1) / kEntryThreads),
                                             kEntryThreads, 0, stream, p, slots);
  }
  return error == nullptr ? key_sums::sum_rows(p.dk, slots, is_first, is_last, stream) : error;
}

}  // namespace

const char* launch(Params p, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const bool has_entries = p.seq > 0 && p.capacity > 0;
  const char* error = nullptr;
  if (!has_entries) {
    error = key_sums::clear_result(p.dk, stream);
    p.deterministic = false;
  } else if (!p.deterministic) {
    error = key_sums::clear_sums(p.dk, stream);
  }
  const int step = p.groups_at_once * queries_of_group(p.heads);
  for (p.first_query = 0; error == nullptr && p.first_query < p.seq; p.first_query += step) {
    p.queries = std::min(step, p.seq - p.first_query);
    const int groups = (p.queries + queries_of_group(p.heads) - 1) / queries_of_group(p.heads);
    error = launch_groups(p, groups, p.first_query == 0, p.first_query + p.queries == p.seq, stream);
  }
  if (error == nullptr && has_entries && !p.deterministic) error = key_sums::round_sums(p.dk, stream);
  return error;
}

}  // namespace dsa::indexer_bwd
