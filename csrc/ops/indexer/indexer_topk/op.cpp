// dsa::indexer_topk on CUDA: scores a run of queries, selects their keys, then goes on to the next run, so that only
// one run's logits are held at a time. Math: docs/indexer/indexer_topk.md.
#include <algorithm>
#include <optional>
#include <tuple>

#include "ops/indexer/indexer_topk/plan.h"
#include "ops/indexer/inputs.h"
#include "ops/indexer/topk_select/config.h"
#include "ops/indexer/topk_select/params.h"

namespace dsa::indexer_topk {
namespace {

constexpr char kOp[] = "dsa::indexer_topk";

std::tuple<Tensor, Tensor> indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, int64_t topk,
                                        std::optional<Tensor> k_scale) {
  indexer::Scoring scoring{q, k, weights, starts, ends, k_scale};
  indexer::check_inputs(kOp, scoring);
  topk_select::check_topk(kOp, topk);
  const DeviceCall call(kOp, "q", q);

  const int64_t seq = q.size(0), seq_kv = k.size(0);
  Tensor indices = empty({seq, topk}, ScalarType::Int, call.index);
  Tensor values = empty({seq, topk}, ScalarType::Float, call.index);
  const int64_t step = queries_at_once(seq, seq_kv);
  const Tensor logits = empty_float_rows(step, seq_kv, call.index);
  for (int64_t first = 0; first < seq; first += step) {
    const int64_t count = std::min(step, seq - first);
    indexer_logits::Params scores = indexer::params_of(scoring, first, count, logits, call);
    scores.clean = false;
    const topk_select::Params selection{
        .logits = scores.logits,
        .starts = scores.starts,
        .ends = scores.ends,
        .indices = static_cast<int*>(indices.data_ptr()) + first * topk,
        .values = static_cast<float*>(values.data_ptr()) + first * topk,
        .logits_stride = scores.logits_stride,
        .starts_stride = scores.starts_stride,
        .ends_stride = scores.ends_stride,
        .rows = static_cast<int>(count),
        .columns = static_cast<int>(seq_kv),
        .topk = static_cast<int>(topk),
        .ctas = topk_select::plan_ctas(count, static_cast<int>(seq_kv), call.num_sms),
        .device = call.index,
        .num_sms = call.num_sms,
        .is_bf16 = false,
        .to_slots = false,
        .table = {},
    };
    if (seq_kv > 0) call.check(indexer_logits::launch(scores, call.stream()));
    call.check(topk_select::launch(selection, call.stream()));
  }
  return {indices, values};
}

}  // namespace
}  // namespace dsa::indexer_topk

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_topk", TORCH_BOX(&dsa::indexer_topk::indexer_topk)); }
