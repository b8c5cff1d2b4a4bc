// Launches the kernels that merge lists.
#include "ops/shared/merged_lists/merge.cuh"
#include "sm90/launch.h"

namespace dsa::merged_lists {
namespace {

template <int kQueries, bool kInOrder>
const char* launch_instance(const Problem& p, const Lists& lists, const Conditions& conditions, cudaStream_t stream) {
  const int bytes = window_words(kQueries, p.seq_kv) * int(sizeof(unsigned));
  return sm90::launch_kernel<merge_lists_kernel<kQueries, kInOrder>>(p.device, unsigned(lists.runs), kMergeThreads,
                                                                     bytes, stream, p, lists, conditions);
}

template <bool kInOrder>
const char* launch_merge(const Problem& p, const Lists& lists, const Conditions& conditions, cudaStream_t stream) {
  return lists.queries == 2   ? launch_instance<2, kInOrder>(p, lists, conditions, stream)
         : lists.queries == 4 ? launch_instance<4, kInOrder>(p, lists, conditions, stream)
                              : launch_instance<8, kInOrder>(p, lists, conditions, stream);
}

}  // namespace

const char* merge(const Problem& p, const Lists& lists, const Conditions& conditions, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const char* error = conditions.in_order ? launch_merge<true>(p, lists, conditions, stream)
                                          : launch_merge<false>(p, lists, conditions, stream);
  if (error == nullptr && conditions.finite) {
    const int64_t runs = runs_of_sequence(p.seq_q, lists.queries) * p.groups;
    const int64_t first_b = lists.first_run / runs, last_b = (int64_t{lists.first_run} + lists.runs - 1) / runs;
    const int64_t blocks = (last_b - first_b + 1) * p.groups * ((p.seq_kv + 31) / 32);
    error = sm90::launch_kernel<drop_unfit_runs_kernel>(p.device, unsigned(blocks), kKeyThreads, 0, stream, p, lists,
                                                        int(first_b));
  }
  if (error != nullptr) return error;
  return sm90::launch_kernel<list_items_kernel>(p.device, 1, kListThreads, 0, stream, p, lists);
}

}  // namespace dsa::merged_lists
