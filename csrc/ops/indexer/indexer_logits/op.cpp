// dsa::indexer_logits on CUDA: allocation and launch. Math: docs/indexer/indexer_logits.md.
#include <optional>

#include "ops/indexer/indexer_logits/config.h"
#include "ops/indexer/inputs.h"

namespace dsa::indexer_logits {
namespace {

constexpr char kOp[] = "dsa::indexer_logits";

// CTAs share out the work in units that they count in 32 bits. (indexer_topk limits its runs of queries by their
// memory.)
void check_units(const Tensor& q, const Tensor& k) {
  const int64_t seq = q.size(0), heads = q.size(1), row_bytes = q.size(2) * static_cast<int64_t>(q.element_size());
  const int queries = Config{static_cast<int>(row_bytes), static_cast<int>(heads), false}.queries();
  const int64_t blocks = (seq + queries - 1) / queries, parts = (k.size(0) + kPartKeys - 1) / kPartKeys;
  const int64_t units = blocks * (kStartUnits + parts);
  DSA_CHECK(units < int64_t{1} << 31, kOp, ": q and k must make fewer than 2^31 units of work (each ", queries,
            " queries: one for each ", kPartKeys, " keys, and ", kStartUnits, " more), got ", units);
}

Tensor indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, std::optional<Tensor> k_scale,
                      bool clean, bool /*deterministic: the backward*/) {
  indexer::Scoring scoring{q, k, weights, starts, ends, k_scale};
  indexer::check_inputs(kOp, scoring);
  check_units(q, k);
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
