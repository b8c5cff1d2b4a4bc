// dsa::indexer_logits on CUDA: allocation and launch. Math: docs/indexer/indexer_logits.md.
#include <optional>

#include "ops/indexer/indexer_logits_paged/config.h"
#include "ops/indexer/indexer_logits_paged/params.h"
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

// Few queries take less time to score than their keys to read, at which the kernel of indexer_logits_paged is better.
// Its logits are bitwise the same.
bool are_few(const Params& p) {
  return p.seq <= indexer_logits_paged::kMaxQueries && reinterpret_cast<uintptr_t>(p.k_scale) % 16 == 0;
}

// The queries of one sequence, of which all keys are one page.
indexer_logits_paged::Params sequence_of(const Params& p) {
  return {
      .q = p.q,
      .k_cache = p.k,
      .weights = p.weights,
      .context_lens = p.ends,
      .block_table = nullptr,
      .starts = p.starts,
      .k_scale = p.k_scale,
      .logits = p.logits,
      .bounds = nullptr,
      .q_stride_b = 0,
      .q_stride_n = p.q_stride_s,
      .q_stride_h = p.q_stride_h,
      .weights_stride = p.weights_stride,
      .cache_stride_block = 0,
      .cache_stride_key = p.k_stride,
      .lens_stride_b = 0,
      .lens_stride_n = p.ends_stride,
      .table_stride_b = 0,
      .table_stride_page = 0,
      .starts_stride = p.starts_stride,
      .logits_stride = p.logits_stride,
      .batch = 1,
      .queries = p.seq,
      .heads = p.heads,
      .dim = p.dim,
      .blocks = 1,
      .page = p.seq_kv,
      .columns = p.seq_kv,
      .max_keys = p.seq_kv,
      .length_per_query = true,
      .clean = p.clean,
      .is_bf16 = p.is_bf16,
      .device = p.device,
      .num_sms = p.num_sms,
  };
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  if (are_few(params)) return indexer_logits_paged::launch(sequence_of(params), stream);
  return params.is_bf16 ? launch_bf16(params, stream) : launch_fp8(params, stream);
}

}  // namespace dsa::indexer_logits

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_logits", TORCH_BOX(&dsa::indexer_logits::indexer_logits)); }
