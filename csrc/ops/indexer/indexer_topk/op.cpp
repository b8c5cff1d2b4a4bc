// dsa::indexer_topk on CUDA. Queries are taken in runs, so that only one run's logits or candidates are held at a time.
// Math: docs/indexer/indexer_topk.md.
#include <algorithm>
#include <optional>
#include <tuple>

#include "ops/indexer/indexer_logits/config.h"
#include "ops/indexer/indexer_topk/params.h"
#include "ops/indexer/indexer_topk/plan.h"
#include "ops/indexer/inputs.h"
#include "ops/indexer/topk_select/config.h"
#include "ops/indexer/topk_select/params.h"

namespace dsa::indexer_topk {
namespace {

constexpr char kOp[] = "dsa::indexer_topk";

struct Results {
  Tensor indices, values;

  int* indices_at(int64_t query) const { return static_cast<int*>(indices.data_ptr()) + query * indices.size(1); }
  float* values_at(int64_t query) const { return static_cast<float*>(values.data_ptr()) + query * values.size(1); }
  int topk() const { return static_cast<int>(indices.size(1)); }
};

int* ints(const Tensor& tensor) { return static_cast<int*>(tensor.data_ptr()); }
float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

// Stores the logits of a run of queries, selects their keys, then goes on to the next run. If `skips_empty`, nothing is
// done for queries that see no keys.
void select_from_logits(const indexer::Scoring& scoring, const Results& results, bool skips_empty,
                        const DeviceCall& call) {
  const int64_t seq = scoring.q.size(0), seq_kv = scoring.k.size(0);
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
        .indices = results.indices_at(first),
        .values = results.values_at(first),
        .logits_stride = scores.logits_stride,
        .starts_stride = scores.starts_stride,
        .ends_stride = scores.ends_stride,
        .rows = static_cast<int>(count),
        .columns = static_cast<int>(seq_kv),
        .topk = results.topk(),
        .ctas = topk_select::plan_ctas(count, static_cast<int>(seq_kv), call.num_sms),
        .device = call.index,
        .num_sms = call.num_sms,
        .is_bf16 = false,
        .skips_empty = skips_empty,
        .programmatic = seq_kv > 0,
    };
    if (seq_kv > 0) call.check(indexer_logits::launch(scores, call.stream()));
    call.check(topk_select::launch(selection, call.stream()));
  }
}

// Selects from candidates. Sets `redo_starts` and `redo_ends` to the bounds of queries that have none of the right
// number, and to 0 for the others.
void select_from_candidates(const indexer::Scoring& scoring, const Results& results, const FilterPlan& plan,
                            int block_queries, const Tensor& redo_starts, const Tensor& redo_ends,
                            const DeviceCall& call) {
  constexpr int kCandidateInts = sizeof(Candidate) / sizeof(int);
  const auto new_ints = [&](int64_t count) { return empty({count}, ScalarType::Int, call.index); };
  const auto new_floats = [&](int64_t count) { return empty({count}, ScalarType::Float, call.index); };
  const int64_t seq = scoring.q.size(0), most = std::min<int64_t>(plan.queries, seq);
  const int64_t blocks = (most + block_queries - 1) / block_queries;
  const int64_t visits = FilterPlan::visits(blocks, call.num_sms), lists = visits * block_queries;
  const Tensor sample_starts = new_ints(seq), sample_ends = new_ints(seq), sample_scale = new_floats(plan.sampled);
  const Tensor sample = empty({most, plan.sampled}, ScalarType::Float, call.index), bars = new_floats(most);
  const Tensor candidates = new_ints(lists * plan.capacity * kCandidateInts), counts = new_ints(lists);
  const Tensor sample_candidates = new_ints(most * kSampleList * kCandidateInts), sample_counts = new_ints(most);
  const Tensor block_ctas = new_ints(2 * blocks);

  for (int64_t first = 0; first < seq; first += most) {
    const int64_t count = std::min(most, seq - first);
    indexer_logits::Params scores = indexer::params_of(scoring, first, count, sample, call);
    scores.clean = false;
    const Params params{
        .lists = {.candidates = static_cast<Candidate*>(candidates.data_ptr()),
                  .counts = ints(counts),
                  .block_ctas = ints(block_ctas),
                  .bars = floats(bars),
                  .block_queries = block_queries,
                  .capacity = plan.capacity,
                  .period = plan.period},
        .starts = scores.starts,
        .ends = scores.ends,
        .starts_stride = scores.starts_stride,
        .ends_stride = scores.ends_stride,
        .k_scale = scores.k_scale,
        .sample_starts = ints(sample_starts) + first,
        .sample_ends = ints(sample_ends) + first,
        .sample_scale = floats(sample_scale),
        .sample = floats(sample),
        .sample_candidates = static_cast<Candidate*>(sample_candidates.data_ptr()),
        .sample_counts = ints(sample_counts),
        .bars = floats(bars),
        .redo_starts = ints(redo_starts) + first,
        .redo_ends = ints(redo_ends) + first,
        .indices = results.indices_at(first),
        .values = results.values_at(first),
        .queries = static_cast<int>(count),
        .keys = scores.seq_kv,
        .sampled = plan.sampled,
        .topk = results.topk(),
        .visits = static_cast<int>(visits),
        .device = call.index,
    };
    if (first == 0) {
      Params all = params;
      all.queries = static_cast<int>(seq);
      call.check(launch_bounds(all, call.stream()));
    }
    indexer_logits::Params sampling = scores;
    sampling.starts = params.sample_starts;
    sampling.ends = params.sample_ends;
    sampling.starts_stride = sampling.ends_stride = 1;
    sampling.k_scale = params.sample_scale;
    sampling.seq_kv = plan.sampled;
    sampling.sample_period = plan.period;
    call.check(indexer_logits::launch(sampling, call.stream()));
    call.check(launch_bars(params, call.stream()));
    call.check(launch_lists(scores, params.lists, call.stream()));
    call.check(launch_select(params, call.stream()));
  }
}

std::tuple<Tensor, Tensor> indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, int64_t topk,
                                        std::optional<Tensor> k_scale) {
  indexer::Scoring scoring{q, k, weights, starts, ends, k_scale};
  indexer::check_inputs(kOp, scoring);
  topk_select::check_topk(kOp, topk);
  const DeviceCall call(kOp, "q", q);

  const int64_t seq = q.size(0);
  const Results results{empty({seq, topk}, ScalarType::Int, call.index),
                        empty({seq, topk}, ScalarType::Float, call.index)};
  const int row_bytes = static_cast<int>(q.size(2) * static_cast<int64_t>(q.element_size()));
  const int heads = static_cast<int>(q.size(1)), block_queries = indexer_logits::Config{row_bytes, heads}.queries();
  const FilterPlan plan = plan_filter(seq, k.size(0), heads, results.topk(), block_queries, call.num_sms);
  if (plan.period == 0) {
    select_from_logits(scoring, results, false, call);
  } else {
    const Tensor redo_starts = empty({seq}, ScalarType::Int, call.index);
    const Tensor redo_ends = empty({seq}, ScalarType::Int, call.index);
    select_from_candidates(scoring, results, plan, block_queries, redo_starts, redo_ends, call);
    scoring.starts = redo_starts;
    scoring.ends = redo_ends;
    select_from_logits(scoring, results, true, call);
  }
  return {results.indices, results.values};
}

}  // namespace
}  // namespace dsa::indexer_topk

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_topk", TORCH_BOX(&dsa::indexer_topk::indexer_topk)); }
