// Launches the kernels that merge lists.
#include "ops/shared/merged_lists/merge.cuh"
#include "sm90/launch.h"

namespace dsa::merged_lists {
namespace {

template <int kQueries>
const char* launch_merge(const Problem& p, const Lists& lists, const Operands& operands, cudaStream_t stream) {
  const int bytes = kQueries * window_words(kQueries, p.seq_kv) * int(sizeof(unsigned));
  return sm90::launch_kernel<merge_lists_kernel<kQueries>>(p.device, unsigned(lists.runs), kMergeThreads, bytes, stream,
                                                           p, lists, operands);
}

}  // namespace

const char* find_unfit_keys(const Problem& p, const Operands& operands, void* stream) {
  const int64_t warps = int64_t{p.batch} * p.groups * words_of_keys(p.seq_kv), per_block = kKeyThreads / 32;
  if (warps == 0) return nullptr;
  return sm90::launch_kernel<find_unfit_keys_kernel>(p.device, unsigned((warps + per_block - 1) / per_block),
                                                     kKeyThreads, 0, static_cast<cudaStream_t>(stream), p, operands);
}

const char* merge(const Problem& p, const Lists& lists, const Operands& operands, void* s) {
  const auto stream = static_cast<cudaStream_t>(s);
  const char* error = lists.queries == 2   ? launch_merge<2>(p, lists, operands, stream)
                      : lists.queries == 4 ? launch_merge<4>(p, lists, operands, stream)
                                           : launch_merge<8>(p, lists, operands, stream);
  if (error != nullptr) return error;
  return sm90::launch_kernel<list_items_kernel>(p.device, 1, kListThreads, 0, stream, p, lists);
}

}  // namespace dsa::merged_lists
