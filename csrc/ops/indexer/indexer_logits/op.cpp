// dsa::indexer_logits on CUDA: allocation and launch. Math: docs/indexer/indexer_logits.md.
#include <optional>

#include "ops/indexer/inputs.h"

namespace dsa::indexer_logits {
namespace {

constexpr char kOp[] = "dsa::indexer_logits";

Tensor indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, std::optional<Tensor> k_scale,
                      bool clean, bool /*deterministic: the backward*/) {
  indexer::Scoring scoring{q, k, weights, starts, ends, k_scale};
  indexer::check_inputs(kOp, scoring);
  const DeviceCall call(kOp, "q", q);

  const int64_t seq = q.size(0), seq_kv = k.size(0);
  Tensor logits = empty_float_rows(seq, seq_kv, call.index);
  if (seq * seq_kv == 0) return logits;
  Params params = indexer::params_of(scoring, 0, seq, logits, call);
  params.clean = clean;
  call.check(launch(params, call.stream()));
  return logits;
}

}  // namespace
}  // namespace dsa::indexer_logits

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_logits", TORCH_BOX(&dsa::indexer_logits::indexer_logits)); }
