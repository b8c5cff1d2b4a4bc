#include "ops/indexer/paged_inputs.h"

#include <algorithm>

#include "ops/indexer/inputs.h"

namespace dsa::indexer {
namespace {

constexpr int64_t kMaxQueries = 6;
constexpr int64_t kScaleBytes = sizeof(float);

// The pages of a cache with scales, which are read as one piece of memory each.
void check_pages_aligned(const char* op, const Tensor& k_cache) {
  if (k_cache.numel() == 0) return;
  const int64_t page = k_cache.size(1), width = k_cache.size(2);
  DSA_CHECK(k_cache.stride(2) == 1 && (page == 1 || k_cache.stride(1) == width), op,
            ": k_cache must have contiguous pages, got strides ", k_cache.stride(1), " and ", k_cache.stride(2),
            " in dimensions 1 and 2");
  DSA_CHECK(k_cache.size(0) == 1 || k_cache.stride(0) % 16 == 0, op,
            ": k_cache must have pages that start 16-byte aligned: a stride in multiples of 16 bytes, got stride ",
            k_cache.stride(0), " in dimension 0");
  const auto address = reinterpret_cast<uintptr_t>(k_cache.data_ptr());
  DSA_CHECK(address % 16 == 0, op, ": k_cache must start 16-byte aligned, got an address that is ", address % 16,
            " bytes past a multiple of 16");
}

}  // namespace

void check_paged_inputs(const char* op, const PagedScoring& scoring) {
  const auto& [q, k_cache, weights, context_lens, block_table] = scoring;
  check_tensor(op, "q", q, {ScalarType::Float8_e4m3fn, ScalarType::BFloat16}, {{"B"}, {"N"}, {"Hi"}, {"Di"}});
  const int64_t batch = q.size(0), queries = q.size(1), heads = q.size(2), dim = q.size(3);
  const bool is_fp8 = q.scalar_type() == ScalarType::Float8_e4m3fn;
  if (is_fp8) {
    check_tensor(op, "k_cache", k_cache, ScalarType::Byte, {{"blocks"}, {"page"}, {"Di + 4", dim + kScaleBytes}});
  } else {
    check_tensor(op, "k_cache", k_cache, ScalarType::BFloat16, {{"blocks"}, {"page"}, {"Di", dim}});
  }
  check_tensor(op, "weights", weights, ScalarType::Float, {{"B * N", batch * queries}, {"Hi", heads}});
  if (context_lens.dim() == 1) {
    check_tensor(op, "context_lens", context_lens, ScalarType::Int, {{"B", batch}});
  } else {
    check_tensor(op, "context_lens", context_lens, ScalarType::Int, {{"B", batch}, {"N", queries}});
  }
  check_tensor(op, "block_table", block_table, ScalarType::Int, {{"B", batch}, {"pages"}});
  DSA_CHECK(queries >= 1 && queries <= kMaxQueries, op, ": q must have 1 to ", kMaxQueries,
            " queries per sequence, got ", queries);
  check_heads(op, heads, dim);
  DSA_CHECK(!is_fp8 || k_cache.size(1) % 4 == 0, op,
            ": k_cache must have a multiple of 4 keys per page when q is float8_e4m3fn, got ", k_cache.size(1));

  check_rows_aligned(op, "q", q);
  check_rows_aligned(op, "weights", weights);
  if (is_fp8) {
    check_pages_aligned(op, k_cache);
  } else {
    check_rows_aligned(op, "k_cache", k_cache);
  }
  check_same_device(op, "k_cache", k_cache, "q", q);
  check_same_device(op, "weights", weights, "q", q);
  check_same_device(op, "context_lens", context_lens, "q", q);
  check_same_device(op, "block_table", block_table, "q", q);
}

int64_t check_columns(const char* op, const PagedScoring& scoring, std::optional<int64_t> max_len) {
  constexpr int64_t kMax = (int64_t{1} << 31) - (int64_t{1} << 26);
  const int64_t columns = max_len.value_or(scoring.block_table.size(1) * scoring.k_cache.size(1));
  DSA_CHECK(columns >= 0 && columns <= kMax, op,
            ": the logits must have 0 to 2^31 - 2^26 columns (max_len, or pages * page), got ", columns);
  return columns;
}

indexer_logits_paged::Params paged_params_of(const PagedScoring& scoring, int64_t first, int64_t count,
                                             const Tensor& logits, const DeviceCall& call) {
  const auto& [q, k_cache, weights, context_lens, block_table] = scoring;
  const int64_t queries = q.size(1), page = k_cache.size(1), held = block_table.size(1) * page;
  const auto at = [&](const Tensor& tensor, int64_t row) {
    return static_cast<const char*>(tensor.data_ptr()) +
           row * tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
  };
  const bool is_fp8 = q.scalar_type() == ScalarType::Float8_e4m3fn, per_query = context_lens.dim() == 2;
  return {
      .q = at(q, first),
      .k_cache = k_cache.data_ptr(),
      .weights = reinterpret_cast<const float*>(at(weights, first * queries)),
      .context_lens = reinterpret_cast<const int*>(at(context_lens, first)),
      .block_table = reinterpret_cast<const int*>(at(block_table, first)),
      .starts = nullptr,
      .k_scale = nullptr,
      .logits = static_cast<float*>(logits.data_ptr()),
      .bounds = nullptr,
      .q_stride_b = q.stride(0),
      .q_stride_n = q.stride(1),
      .q_stride_h = q.stride(2),
      .weights_stride = weights.stride(0),
      .cache_stride_block = k_cache.stride(0),
      .cache_stride_key = is_fp8 ? q.size(3) : k_cache.stride(1),
      .lens_stride_b = context_lens.stride(0),
      .lens_stride_n = per_query ? context_lens.stride(1) : 0,
      .table_stride_b = block_table.stride(0),
      .table_stride_page = block_table.stride(1),
      .starts_stride = 0,
      .logits_stride = logits.stride(0),
      .batch = static_cast<int>(count),
      .queries = static_cast<int>(queries),
      .heads = static_cast<int>(q.size(2)),
      .dim = static_cast<int>(q.size(3)),
      .blocks = static_cast<int>(k_cache.size(0)),
      .page = static_cast<int>(std::max<int64_t>(1, page)),
      .columns = static_cast<int>(logits.size(1)),
      .max_keys = k_cache.size(0) == 0 ? 0 : static_cast<int>(std::min(logits.size(1), held)),
      .length_per_query = per_query,
      .clean = true,
      .is_bf16 = !is_fp8,
      .device = call.index,
      .num_sms = call.num_sms,
  };
}

topk_select::PageTable page_table_of(const Tensor& table, int64_t page_size, int64_t rows) {
  const int64_t sequences = table.size(0);
  return {
      .entries = static_cast<const int*>(table.data_ptr()),
      .row_to_sequence = nullptr,
      .stride_sequence = table.stride(0),
      .stride_page = table.stride(1),
      .stride_row = 0,
      .sequences = static_cast<int>(sequences),
      .pages = static_cast<int>(table.size(1)),
      .page_size = static_cast<int>(page_size),
      .rows_per_sequence = static_cast<int>(std::max<int64_t>(1, rows / std::max<int64_t>(1, sequences))),
  };
}

}  // namespace dsa::indexer
