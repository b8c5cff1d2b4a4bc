// Chooses the kernel.
#include "config.h"
#include "ops/indexer/indexer_logits_paged/config.h"
#include "ops/indexer/indexer_logits_paged/params.h"
#include "params.h"

namespace dsa::indexer_logits {
namespace {

// If all rows of Q are one product, the call is limited by reading the keys, for which the kernel of
// indexer_logits_paged is faster. Its logits are bitwise the same.
bool are_few(const Params& p) {
  return p.seq <= indexer_logits_paged::kMaxQueries && p.seq * p.heads <= kPassRows &&
         reinterpret_cast<uintptr_t>(p.k_scale) % 16 == 0;
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

const char* launch_above(const Params& params, void* stream) {
  return params.is_bf16 ? launch_above_bf16(params, stream) : launch_above_fp8(params, stream);
}

}  // namespace dsa::indexer_logits
