// Launches the kernels of calls whose lists are merged.
#include <algorithm>

#include "instances.cuh"
#include "params.h"

namespace dsa::sparse_mla_fwd {
namespace {

template <int kColumns>
const char* launch_items(const MergedParams& p, cudaStream_t stream) {
  constexpr int kWide = kColumns == 576 ? 0 : 1, kNarrow = kColumns == 576 ? 4 : 5;
  const char* error = launch_config<kWide, false>(p, stream, {.heads = p.heads, .positions = p.lists.queries});
  return error == nullptr ? launch_config<kNarrow, false>(p, stream) : error;
}

}  // namespace

const char* launch_merging(const Params& params, const merged_lists::Lists& all, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const int64_t runs = merged_lists::runs_of_call(params.batch, params.seq_q, params.groups, all.queries);
  merged_lists::Lists lists = all;
  const char* error = nullptr;
  for (int64_t first = 0; error == nullptr && first < runs; first += all.runs) {
    lists.first_run = int(first);
    lists.runs = int(std::min<int64_t>(all.runs, runs - first));
    error = merged_lists::merge(params, lists, {.finite = true}, s);
    const MergedParams p(params, lists);
    if (error == nullptr) error = params.d_qk == 576 ? launch_items<576>(p, stream) : launch_items<512>(p, stream);
  }
  return error;
}

}  // namespace dsa::sparse_mla_fwd
