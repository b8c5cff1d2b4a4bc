#include "ops/shared/merged_lists/buffers.h"

namespace dsa::merged_lists {

Tensor allocate(const listed_keys::Problem& p, int percent, Lists& lists) {
  const int queries = queries_of_run(p.heads / p.groups);
  const int64_t capacity = entries_of_run(queries, p.topk, p.seq_kv, percent);
  const int64_t runs = runs_at_once(runs_of_call(p.batch, p.seq_q, p.groups, queries), words_of_run(capacity, queries));
  Tensor buffer = empty({runs * words_of_run(capacity, queries) + 2}, ScalarType::Int, p.device);
  auto* const first = static_cast<int*>(buffer.data_ptr());
  lists.queries = queries;
  lists.capacity = static_cast<int>(capacity);
  lists.runs = static_cast<int>(runs);
  lists.entries = reinterpret_cast<unsigned*>(first);
  lists.counts = first + runs * capacity;
  lists.items = lists.counts + runs;
  lists.percent = percent;
  lists.item_counts = lists.items + runs * queries;
  return buffer;
}

}  // namespace dsa::merged_lists
