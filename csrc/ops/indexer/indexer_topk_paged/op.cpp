// dsa::indexer_topk_paged on CUDA: scores the keys of a run of sequences, selects among them, then goes on to the next
// run, so that only one run's logits are held at a time. Math: docs/indexer/indexer_topk_paged.md.
#include <algorithm>
#include <tuple>

#include "ops/indexer/indexer_topk/plan.h"
#include "ops/indexer/paged_inputs.h"
#include "ops/indexer/topk_select/config.h"
#include "ops/indexer/topk_select/params.h"

namespace dsa::indexer_topk_paged {
namespace {

constexpr char kOp[] = "dsa::indexer_topk_paged";

std::tuple<Tensor, Tensor> indexer_topk_paged(Tensor q, Tensor k_cache, Tensor weights, Tensor context_lens,
                                              Tensor block_table, int64_t topk, bool return_slots) {
  const indexer::PagedScoring scoring{q, k_cache, weights, context_lens, block_table};
  indexer::check_paged_inputs(kOp, scoring);
  const int64_t columns = indexer::check_columns(kOp, scoring, std::nullopt);
  topk_select::check_topk(kOp, topk);
  const DeviceCall call(kOp, "q", q);

  const int64_t batch = q.size(0), queries = q.size(1), page = k_cache.size(1);
  Tensor indices = empty({batch * queries, topk}, ScalarType::Int, call.index);
  Tensor values = empty({batch * queries, topk}, ScalarType::Float, call.index);
  const int64_t step = std::max<int64_t>(1, indexer_topk::rows_at_once(batch * queries, columns) / queries);
  const Tensor logits = empty_float_rows(std::min(step, batch) * queries, columns, call.index);
  const Tensor bounds = empty({2, std::min(step, batch) * queries}, ScalarType::Int, call.index);
  for (int64_t first = 0; first < batch; first += step) {
    const int64_t count = std::min(step, batch - first), rows = count * queries;
    indexer_logits_paged::Params scores = indexer::paged_params_of(scoring, first, count, logits, call);
    scores.clean = false;
    scores.bounds = static_cast<int*>(bounds.data_ptr());
    topk_select::Params selection{
        .logits = scores.logits,
        .starts = scores.bounds,
        .ends = scores.bounds + rows,
        .wanted = nullptr,
        .indices = static_cast<int*>(indices.data_ptr()) + first * queries * topk,
        .values = static_cast<float*>(values.data_ptr()) + first * queries * topk,
        .logits_stride = scores.logits_stride,
        .starts_stride = 1,
        .ends_stride = 1,
        .rows = static_cast<int>(rows),
        .columns = static_cast<int>(columns),
        .topk = static_cast<int>(topk),
        .device = call.index,
        .num_sms = call.num_sms,
        .is_bf16 = false,
        .to_slots = return_slots,
        .table = indexer::page_table_of(block_table, std::max<int64_t>(1, page), batch * queries),
    };
    selection.table.entries = scores.block_table;
    selection.table.sequences = static_cast<int>(count);
    call.check(indexer_logits_paged::launch(scores, call.stream()));
    call.check(topk_select::launch(selection, call.stream()));
  }
  return {indices, values};
}

}  // namespace
}  // namespace dsa::indexer_topk_paged

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("indexer_topk_paged", TORCH_BOX(&dsa::indexer_topk_paged::indexer_topk_paged));
}
