// The arguments that the indexer's operators on paged caches share, and their checks.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/indexer/indexer_logits_paged/params.h"
#include "ops/indexer/topk_select/params.h"
#include "torch/abi.h"

namespace dsa::indexer {

struct PagedScoring {
  Tensor q, k_cache, weights, context_lens, block_table;
};

// All checks that need no device. `op` is the qualified operator name.
void check_paged_inputs(const char* op, const PagedScoring& scoring);
// The columns of the logits, after a check: `max_len`, or as many as the table's pages hold.
int64_t check_columns(const char* op, const PagedScoring& scoring, std::optional<int64_t> max_len);

// Kernel parameters for sequences [first, first + count), whose logits are the rows of `logits`.
indexer_logits_paged::Params paged_params_of(const PagedScoring& scoring, int64_t first, int64_t count,
                                             const Tensor& logits, const DeviceCall& call);

// For `rows` rows, of which each sequence of the table has as many.
topk_select::PageTable page_table_of(const Tensor& table, int64_t page_size, int64_t rows);

}  // namespace dsa::indexer
