#include "ops/shared/merged_lists/buffers.h"

namespace dsa::merged_lists {

Tensor allocate(const listed_keys::Problem& p, Lists& lists, Operands& operands) {
  const int queries = queries_of_run(p.heads / p.groups);
  const int64_t capacity = entries_of_run(queries, p.topk);
  const int64_t runs = runs_at_once(runs_of_call(p.batch, p.seq_q, p.groups, queries), capacity);
  const int64_t unfit_words = p.batch * p.groups * words_of_keys(p.seq_kv);
  Tensor buffer = empty({runs * (capacity + queries + 1) + unfit_words + 1}, ScalarType::Int, p.device);
  auto* const first = static_cast<int*>(buffer.data_ptr());
  lists.queries = queries;
  lists.capacity = static_cast<int>(capacity);
  lists.runs = static_cast<int>(runs);
  lists.entries = reinterpret_cast<unsigned*>(first);
  lists.counts = first + runs * capacity;
  lists.items = lists.counts + runs;
  lists.item_count = lists.items + runs * queries;
  operands.unfit_keys = reinterpret_cast<unsigned*>(lists.item_count + 1);
  return buffer;
}

}  // namespace dsa::merged_lists
