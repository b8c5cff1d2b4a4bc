// The pure host functions of csrc/, for tests without a GPU.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops/block_sparse/block_sparse_attn_bwd/plan.h"
#include "ops/block_sparse/block_sparse_attn_fwd/plan.h"
#include "ops/indexer/indexer_bwd/config.h"
#include "ops/indexer/indexer_logits/config.h"
#include "ops/indexer/indexer_logits/tickets.h"
#include "ops/indexer/indexer_logits_paged/config.h"
#include "ops/indexer/indexer_topk/plan.h"
#include "ops/indexer/topk_select/config.h"
#include "ops/shared/list_lengths/params.h"
#include "ops/shared/listed_keys/config.h"
#include "ops/shared/merged_lists/config.h"
#include "ops/sparse_mla/sparse_mla_bwd/config.h"
#include "ops/sparse_mla/sparse_mla_decode/divisor.h"
#include "ops/sparse_mla/sparse_mla_decode/plan.h"
#include "ops/sparse_mla/sparse_mla_fwd/config.h"
#include "ops/sparse_mla/sparse_mla_fwd/plan.h"
#include "torch/strides.h"

namespace py = pybind11;

PYBIND11_MODULE(host_functions, m) {
  namespace op = dsa::sparse_mla_fwd;
  m.def("dense_strides", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    std::vector<int64_t> result(sizes.size());
    dsa::dense_strides(static_cast<int>(sizes.size()), sizes.data(), strides.data(), result.data());
    return result;
  });
  m.def("dense_row_strides", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    std::vector<int64_t> result(sizes.size());
    dsa::dense_row_strides(static_cast<int>(sizes.size()), sizes.data(), strides.data(), result.data());
    return result;
  });
  py::module_ fwd = m.def_submodule("sparse_mla_fwd");
  fwd.def("plan_splits", &op::plan_splits, py::arg("items"), py::arg("topk"), py::arg("num_sms"));
  fwd.attr("block_k") = op::kBlockK;
  fwd.attr("max_splits") = op::kMaxSplits;
  fwd.attr("threads") = op::kThreads;
  std::vector<py::tuple> configs;
  for (const op::Config& config : op::kConfigs) {
    configs.push_back(py::make_tuple(config.d_qk, config.d_v, config.heads));
  }
  fwd.attr("configs") = configs;  // (d_qk, d_v, heads)

  py::module_ bwd = m.def_submodule("sparse_mla_bwd");
  bwd.attr("threads") = dsa::sparse_mla_bwd::kThreads;
  bwd.def("queries_at_once", &dsa::sparse_mla_bwd::queries_at_once);
  bwd.def("pair_queries_at_once", &dsa::sparse_mla_bwd::pair_queries_at_once);
  bwd.def("plan_items", [](int64_t items, int topk, int num_sms) {  // (whole items, parts of each other one)
    const auto plan = dsa::sparse_mla_bwd::plan_items(items, topk, num_sms);
    return py::make_tuple(plan.whole, plan.parts);
  });
  std::vector<py::tuple> bwd_configs;
  for (const dsa::sparse_mla_bwd::Config& config : dsa::sparse_mla_bwd::kConfigs) {
    bwd_configs.push_back(py::make_tuple(config.d_qk, config.d_v, config.merged));
  }
  bwd.attr("configs") = bwd_configs;  // (d_qk, d_v, merged)
  bwd.def("most_ctas", &dsa::sparse_mla_bwd::most_ctas);
  auto merged = m.def_submodule("merged_lists");
  merged.def("queries_of_run", &dsa::merged_lists::queries_of_run);
  merged.def("entries_of_run", &dsa::merged_lists::entries_of_run);
  merged.def("are_merged", &dsa::merged_lists::are_merged);
  merged.def("are_merged_forward", &dsa::merged_lists::are_merged_forward);
  merged.def("words_of_run", &dsa::merged_lists::words_of_run);
  merged.def("runs_at_once", &dsa::merged_lists::runs_at_once);
  auto lengths = m.def_submodule("list_lengths");
  lengths.def("are_found", [](int batch, int seq_q, int groups, int topk, bool are_given, int64_t fewest_slots) {
    const int given = 0;
    dsa::listed_keys::Problem problem{};
    problem.topk_length = are_given ? &given : nullptr;
    problem.batch = batch, problem.seq_q = seq_q, problem.groups = groups, problem.topk = topk;
    return dsa::list_lengths::are_found(problem, fewest_slots);
  });
  lengths.attr("fewest_slots") = dsa::list_lengths::kFewestSlots;
  lengths.attr("fewest_decode_slots") = dsa::list_lengths::kFewestDecodeSlots;
  lengths.attr("fewest_queries") = dsa::list_lengths::kFewestQueries;

  py::module_ decode = m.def_submodule("sparse_mla_decode");
  decode.def("make_plan", [](int64_t tokens, int heads, int topk, int num_sms, bool is_packed, bool batch_invariant) {
    const auto plan = dsa::sparse_mla_decode::make_plan(tokens, heads, topk, num_sms, is_packed, batch_invariant);
    return py::make_tuple(plan.block_heads, plan.splits);
  });
  decode.def("quotient", [](uint32_t x, int divisor) { return dsa::sparse_mla_decode::Divisor(divisor).quotient(x); });
  decode.attr("head_blocks") =
      std::vector<int>(std::begin(dsa::sparse_mla_decode::kHeadBlocks), std::end(dsa::sparse_mla_decode::kHeadBlocks));
  decode.attr("max_splits") = dsa::sparse_mla_decode::kMaxSplits;

  // (item, first unit, end, units) of each worker's pieces
  m.def_submodule("block_sparse_attn_fwd").def("pieces", [](int items, int slots, int num_sms) {
    using namespace dsa::block_sparse_attn_fwd;
    const Plan plan = plan_work(items, slots, num_sms);
    std::vector<std::vector<py::tuple>> workers(plan.workers);
    for (int worker = 0; worker < plan.workers; ++worker) {
      Pieces pieces(plan, worker);
      for (Piece piece; pieces.next(piece);) {
        workers[worker].push_back(py::make_tuple(piece.item, piece.begin, piece.end, plan.units));
      }
    }
    return workers;
  });
  // ((tiles of a buffer, buffers, bytes of a tile), (key items, query items, is first, is last part) of each unit, and
  // in the order of work (is for keys, unit, head, block, first tile))
  m.def_submodule("block_sparse_attn_bwd")
      .def("work", [](int kv_heads, int kv_blocks, int query_blocks, int slots, int longest, int num_sms) {
        using namespace dsa::block_sparse_attn_bwd;
        const Plan plan = plan_work(kv_heads, kv_blocks, query_blocks, slots, num_sms);
        const Units units(plan, longest);
        std::vector<py::tuple> sizes, order;
        for (int i = 0; i < units.count(); ++i) {
          sizes.push_back(
              py::make_tuple(units.key_items(i), units.query_items(i), units.is_first_part(i), units.is_last_part(i)));
        }
        Work work;
        for (int64_t place = 0; place < units.places(); ++place) {
          if (!units.find(place, work)) continue;
          const int tile = work.for_keys ? 0 : units.first_tile(work.unit, work.head, work.block);
          order.push_back(py::make_tuple(work.for_keys, work.unit, work.head, work.block, tile));
        }
        return py::make_tuple(py::make_tuple(plan.capacity, plan.buffers, kPairBytes), sizes, order);
      });
  auto listed_keys = m.def_submodule("listed_keys");
  listed_keys.def("threads", [](int columns, int heads) { return dsa::listed_keys::Config{columns, heads}.threads(); });
  listed_keys.def("plan_rounds", [](int queries, int tiles, int num_sms, bool divisible) {  // (whole, pieces, items)
    const auto rounds = dsa::listed_keys::plan_rounds(queries, tiles, num_sms, divisible);
    return py::make_tuple(rounds.whole, rounds.pieces, rounds.items(queries));
  });
  auto indexer_bwd = m.def_submodule("indexer_bwd");
  indexer_bwd.attr("threads") = dsa::indexer_bwd::kThreads;
  indexer_bwd.def("groups_at_once", dsa::indexer_bwd::groups_at_once);
  auto indexer_logits = m.def_submodule("indexer_logits");
  indexer_logits.attr("threads") = dsa::indexer_logits::kThreads;
  indexer_logits.attr("part_keys") = dsa::indexer_logits::kPartKeys;
  indexer_logits.attr("start_units") = dsa::indexer_logits::kStartUnits;
  indexer_logits.def("queries_of_block", [](int row_bytes, int heads) {
    return dsa::indexer_logits::Config{row_bytes, heads, true}.queries();
  });
  indexer_logits.def("rest_of", &dsa::indexer_logits::rest_of);
  indexer_logits.def("tickets", [](int64_t units, unsigned ctas) {  // (begin, end) of each
    std::vector<py::tuple> tickets;
    for (unsigned number = 0; number < dsa::indexer_logits::kRestRounds * ctas; ++number) {
      const auto ticket = dsa::indexer_logits::ticket_of(number, units, ctas);
      tickets.push_back(py::make_tuple(ticket.begin, ticket.end));
    }
    return tickets;
  });
  indexer_logits.def("sampled", &dsa::indexer_logits::sampled);
  indexer_logits.def("key_of_sample", &dsa::indexer_logits::key_of_sample);
  indexer_logits.def("key_of_other", &dsa::indexer_logits::key_of_other);
  m.def_submodule("indexer_logits_paged").def("threads", [](int row_bytes, int heads, int pass_rows, int max_passes) {
    return dsa::indexer_logits_paged::Config{row_bytes, heads, pass_rows, max_passes}.threads();
  });
  auto topk = m.def_submodule("indexer_topk");
  topk.def("rows_at_once", &dsa::indexer_topk::rows_at_once);
  topk.def("keeps_candidates", &dsa::indexer_topk::keeps_candidates);
  topk.def("rank_of_bar", &dsa::indexer_topk::rank_of_bar);
  topk.def("max_candidates", &dsa::indexer_topk::max_candidates);
  py::module_ select = m.def_submodule("topk_select");
  select.attr("threads") = dsa::topk_select::kThreads;
  select.def("plan_row",
             [](int64_t rows, int columns, bool is_bf16, int num_sms, const std::function<int(int)>& clusters_at_once) {
               const auto plan = dsa::topk_select::plan_row(rows, columns, is_bf16, num_sms, clusters_at_once);
               return py::make_tuple(plan.ctas, plan.held);
             });
}
