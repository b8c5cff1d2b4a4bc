// dsa::indexer_logits_paged on CUDA: allocation and launch. Math: docs/indexer/indexer_logits_paged.md.
#include <algorithm>
#include <climits>
#include <optional>

#include "ops/indexer/indexer_logits_paged/config.h"
#include "ops/indexer/paged_inputs.h"

namespace dsa::indexer_logits_paged {
namespace {

constexpr char kOp[] = "dsa::indexer_logits_paged";

// The kernel counts all tiles, and one more for each sequence, in an int. `keys`: the most that a sequence can have.
void check_tiles(int64_t batch, int64_t keys, int64_t page) {
  const int64_t tiles = keys / page * ((page + kTileKeys - 1) / kTileKeys) + (keys % page + kTileKeys - 1) / kTileKeys;
  DSA_CHECK(batch * (tiles + 1) <= INT_MAX, kOp, ": q's sequences must have fewer than 2^31 - B tiles of up to ",
            kTileKeys, " keys of a page, got ", batch * tiles);
}

Tensor indexer_logits_paged(Tensor q, Tensor k_cache, Tensor weights, Tensor context_lens, Tensor block_table,
                            std::optional<int64_t> max_len, bool clean) {
  const indexer::PagedScoring scoring{q, k_cache, weights, context_lens, block_table};
  indexer::check_paged_inputs(kOp, scoring);
  const int64_t batch = q.size(0), rows = batch * q.size(1), columns = indexer::check_columns(kOp, scoring, max_len);
  const int64_t page = std::max<int64_t>(1, k_cache.size(1));
  check_tiles(batch, std::min(columns, block_table.size(1) * page), page);
  const DeviceCall call(kOp, "q", q);

  Tensor logits = empty_float_rows(rows, columns, call.index);
  Params params = indexer::paged_params_of(scoring, 0, batch, logits, call);
  params.clean = clean || params.max_keys == 0;  // without blocks, everything is -inf
  call.check(launch(params, call.stream()));
  return logits;
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  if (params.batch == 0 || params.columns == 0) return nullptr;
  return params.is_bf16 ? launch_bf16(params, stream) : launch_fp8(params, stream);
}

}  // namespace dsa::indexer_logits_paged

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) {
  m.impl("indexer_logits_paged", TORCH_BOX(&dsa::indexer_logits_paged::indexer_logits_paged));
}
