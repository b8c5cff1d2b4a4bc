// Launches the kernels of calls whose lists are merged.
#include <algorithm>

#include "ops/shared/listed_keys/launch.cuh"
#include "ops/sparse_mla/attn_dist/params.h"
#include "ops/sparse_mla/attn_dist/runs.cuh"

namespace dsa::attn_dist {
namespace {

using listed_keys::Attention;

template <int kColumns, int kQueries>
const char* launch_runs(const RunParams& p, cudaStream_t stream) {
  CUtensorMap q_map;
  if (!encode_head_tensor(
          &q_map,
          {p.q, p.d_qk, p.heads, 1, p.seq_q, p.batch, p.q_stride_h, p.heads * p.q_stride_h, p.q_stride_s, p.q_stride_b},
          {.heads = p.heads, .positions = kQueries})) {
    return "no tensor map for q";
  }
  constexpr int kBytes = sizeof(RunStorage<RunConfig{kColumns, kQueries}>);
  static_assert(kBytes <= 227 * 1024);
  return launch_kernel<attn_dist_runs_kernel<kColumns, kQueries>>(p.device, unsigned(std::min(p.lists.runs, p.num_sms)),
                                                                  kRunThreads, kBytes, stream, p, q_map);
}

// The merged runs, then the other queries.
template <int kColumns>
const char* launch_columns(const listed_keys::Params& params, const merged_lists::Lists& lists, cudaStream_t stream) {
  const RunParams p{params, lists, int(merged_lists::runs_of_sequence(params.seq_q, lists.queries))};
  const listed_keys::UnmergedParams others{{params, {params.batch * params.seq_q, 1}}, lists};
  const int most = lists.runs * lists.queries;
  const char* error;
  if (params.heads == 16) {
    error = launch_runs<kColumns, 4>(p, stream);
    return error == nullptr ? listed_keys::launch_items<kColumns, 16, Attention, true>(others, most, stream) : error;
  }
  error = launch_runs<kColumns, 8>(p, stream);
  return error == nullptr
             ? listed_keys::launch_items<kColumns, 16, listed_keys::Partial<Attention>, true>(others, most, stream)
             : error;
}

}  // namespace

const char* launch_merging(const listed_keys::Params& params, const merged_lists::Lists& all, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const int64_t runs = merged_lists::runs_of_call(params.batch, params.seq_q, 1, all.queries);
  merged_lists::Lists lists = all;
  const char* error = nullptr;
  for (int64_t first = 0; error == nullptr && first < runs; first += all.runs) {
    lists.first_run = int(first);
    lists.runs = int(std::min<int64_t>(all.runs, runs - first));
    error = merged_lists::merge(params, lists, {.in_order = true}, s);
    if (error == nullptr) {
      error =
          params.d_qk == 576 ? launch_columns<576>(params, lists, stream) : launch_columns<512>(params, lists, stream);
    }
  }
  return error;
}

}  // namespace dsa::attn_dist
