// dsa::indexer_topk on CUDA. Math and ways: docs/indexer/indexer_topk.md.
#include <algorithm>
#include <optional>
#include <tuple>

#include "ops/indexer/indexer_topk/params.h"
#include "ops/indexer/indexer_topk/plan.h"
#include "ops/indexer/inputs.h"
#include "ops/indexer/topk_select/config.h"

namespace dsa::indexer_topk {
namespace {

constexpr char kOp[] = "dsa::indexer_topk";

// What a call selects into.
struct Results {
  Tensor indices, values;  // [S, topk]

  // Parameters for the best `topk` of rows from `first` on, whose logits and bounds `scores` has.
  topk_select::Params selection(const indexer_logits::Params& scores, int64_t first) const {
    const int64_t topk = indices.size(1);
    return {
        .logits = scores.logits,
        .starts = scores.starts,
        .ends = scores.ends,
        .wanted = nullptr,
        .indices = static_cast<int*>(indices.data_ptr()) + first * topk,
        .values = static_cast<float*>(values.data_ptr()) + first * topk,
        .logits_stride = scores.logits_stride,
        .starts_stride = scores.starts_stride,
        .ends_stride = scores.ends_stride,
        .rows = scores.seq,
        .columns = scores.seq_kv,
        .topk = static_cast<int>(topk),
        .device = scores.device,
        .num_sms = scores.num_sms,
        .is_bf16 = false,
        .to_slots = false,
        .table = {},
    };
  }
};

Results empty_results(int64_t seq, int64_t topk, const DeviceCall& call) {
  return {empty({seq, topk}, ScalarType::Int, call.index), empty({seq, topk}, ScalarType::Float, call.index)};
}

// Scores a run of queries, selects their keys, then goes on to the next run, so that only one run's logits are held.
void select_in_runs(const indexer::Scoring& scoring, const Results& results, const DeviceCall& call) {
  const int64_t seq = scoring.q.size(0), seq_kv = scoring.k.size(0), step = rows_at_once(seq, seq_kv);
  const Tensor logits = empty_float_rows(step, seq_kv, call.index);
  for (int64_t first = 0; first < seq; first += step) {
    indexer_logits::Params scores = indexer::params_of(scoring, first, std::min(step, seq - first), logits, call);
    scores.clean = false;
    if (seq_kv > 0) call.check(indexer_logits::launch(scores, call.stream()));
    call.check(topk_select::launch(results.selection(scores, first), call.stream()));
  }
}

// The keys as two sets, the sample and the others, each with its bounds for all queries.
struct SplitKeys {
  indexer::Scoring sample, others;
};

SplitKeys split_keys(const indexer::Scoring& all, const DeviceCall& call) {
  const auto& [q, k, weights, starts, ends, k_scale] = all;
  const int64_t seq = q.size(0), seq_kv = k.size(0), dim = k.size(1), count = sampled(static_cast<int>(seq_kv));
  const auto part = [&](int64_t keys) {
    indexer::Scoring scoring{q,
                             empty({keys, dim}, k.scalar_type(), call.index),
                             weights,
                             empty({seq}, ScalarType::Int, call.index),
                             empty({seq}, ScalarType::Int, call.index),
                             {}};
    if (k_scale) scoring.k_scale = empty({keys}, ScalarType::Float, call.index);
    return scoring;
  };
  const auto keys_of = [](const indexer::Scoring& scoring) -> Keys {
    return {
        .k = static_cast<char*>(scoring.k.data_ptr()),
        .k_scale = scoring.k_scale ? static_cast<float*>(scoring.k_scale->data_ptr()) : nullptr,
        .starts = static_cast<int*>(scoring.starts.data_ptr()),
        .ends = static_cast<int*>(scoring.ends.data_ptr()),
    };
  };
  const SplitKeys keys{part(count), part(seq_kv - count)};
  const int64_t element = static_cast<int64_t>(k.element_size());
  call.check(launch_split(
      {
          .k = static_cast<const char*>(k.data_ptr()),
          .k_scale = k_scale ? static_cast<const float*>(k_scale->data_ptr()) : nullptr,
          .starts = static_cast<const int*>(starts.data_ptr()),
          .ends = static_cast<const int*>(ends.data_ptr()),
          .k_stride = k.stride(0) * element,
          .starts_stride = starts.stride(0),
          .ends_stride = ends.stride(0),
          .sample = keys_of(keys.sample),
          .others = keys_of(keys.others),
          .seq = static_cast<int>(seq),
          .seq_kv = static_cast<int>(seq_kv),
          .row_bytes = static_cast<int>(dim * element),
          .device = call.index,
      },
      call.stream()));
  return keys;
}

// Scores a sample of the keys for a bar for each query, then the others, of which only logits above the bar are kept.
// The best of these are the best of all, unless there are fewer than topk or too many: such rows are done in runs.
void select_above_bars(const indexer::Scoring& scoring, const Results& results, const DeviceCall& call) {
  const int64_t seq = scoring.q.size(0), seq_kv = scoring.k.size(0), topk = results.indices.size(1);
  const int64_t rank = rank_of_bar(static_cast<int>(topk)), places = max_candidates(static_cast<int>(topk));
  const auto [sample, others] = split_keys(scoring, call);

  // Memory for the logits of the sample, then for candidates, then for the logits of rows that are done in runs.
  const auto stride_of = [&](int64_t columns) { return empty_float_rows(0, columns, call.index).stride(0); };
  const int64_t sample_stride = stride_of(sample.k.size(0)), stride = stride_of(seq_kv);
  const int64_t row_floats = std::max(sample_stride, places * int64_t{sizeof(indexer_logits::Candidate) / 4});
  const int64_t step = rows_at_once(seq, row_floats), rest_step = rows_at_once(step, stride);
  const Tensor memory = empty({std::max(step * row_floats, rest_step * stride)}, ScalarType::Float, call.index);

  const Results bests = empty_results(step, rank, call);  // of the sample
  const Tensor bars = empty({step}, ScalarType::Float, call.index), counts = empty({step}, ScalarType::Int, call.index);
  const Tensor rest = empty({3 * step + 2}, ScalarType::Int, call.index);
  int* const rest_starts = static_cast<int*>(rest.data_ptr());
  int* const rest_ends = rest_starts + step;
  int* const rest_wanted = rest_ends + step;
  int* const any_left = rest_wanted + step;  // and behind it, the tickets that have been taken
  const indexer_logits::Above above{
      .bars = static_cast<const float*>(bars.data_ptr()),
      .counts = static_cast<unsigned*>(counts.data_ptr()),
      .candidates = static_cast<indexer_logits::Candidate*>(memory.data_ptr()),
      .max = static_cast<int>(places),
      .tickets = reinterpret_cast<unsigned*>(any_left + 1),
  };
  const auto params_of = [&](const indexer::Scoring& keys, int64_t first, int64_t count, int64_t logits_stride) {
    indexer_logits::Params params = indexer::params_of(keys, first, count, memory, call);
    params.logits_stride = logits_stride;
    params.clean = false;
    return params;
  };
  for (int64_t first = 0; first < seq; first += step) {
    const int64_t count = std::min(step, seq - first);
    const indexer_logits::Params of_sample = params_of(sample, first, count, sample_stride);
    call.check(indexer_logits::launch(of_sample, call.stream()));
    call.check(topk_select::launch(bests.selection(of_sample, 0), call.stream()));
    call.check(launch_bars(
        {
            .indices = static_cast<const int*>(bests.indices.data_ptr()),
            .values = static_cast<const float*>(bests.values.data_ptr()),
            .bars = static_cast<float*>(bars.data_ptr()),
            .any_left = any_left,
            .above = above,
            .rows = static_cast<int>(count),
            .rank = static_cast<int>(rank),
            .device = call.index,
        },
        call.stream()));
    indexer_logits::Params of_others = params_of(others, first, count, 0);
    of_others.above = above;
    call.check(indexer_logits::launch_above(of_others, call.stream()));
    const indexer_logits::Params of_all = params_of(scoring, first, count, stride);
    call.check(launch_select({results.selection(of_all, first), above, rest_starts, rest_ends, rest_wanted, any_left},
                             call.stream()));

    for (int64_t begin = 0; begin < count; begin += rest_step) {
      indexer_logits::Params scores = params_of(scoring, first + begin, std::min(rest_step, count - begin), stride);
      scores.starts = rest_starts + begin;
      scores.ends = rest_ends + begin;
      scores.starts_stride = scores.ends_stride = 1;
      scores.any_left = any_left;
      topk_select::Params selection = results.selection(scores, first + begin);
      selection.wanted = rest_wanted + begin;
      call.check(indexer_logits::launch(scores, call.stream()));
      call.check(topk_select::launch(selection, call.stream()));
    }
  }
}

std::tuple<Tensor, Tensor> indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, int64_t topk,
                                        std::optional<Tensor> k_scale) {
  indexer::Scoring scoring{q, k, weights, starts, ends, k_scale};
  indexer::check_inputs(kOp, scoring);
  topk_select::check_topk(kOp, topk);
  const DeviceCall call(kOp, "q", q);
  const Results results = empty_results(q.size(0), topk, call);
  if (keeps_candidates(q.size(0), k.size(0), q.size(1), topk)) {
    select_above_bars(scoring, results, call);
  } else {
    select_in_runs(scoring, results, call);
  }
  return {results.indices, results.values};
}

}  // namespace
}  // namespace dsa::indexer_topk

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("indexer_topk", TORCH_BOX(&dsa::indexer_topk::indexer_topk)); }
