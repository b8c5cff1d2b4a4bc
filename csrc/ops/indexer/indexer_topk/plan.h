// How many queries are processed at a time, and how.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/indexer/indexer_topk/sample.h"

namespace dsa::indexer_topk {

// Rows of so many 4-byte elements that fill at most 256 MiB, but at least one. A multiple of 64 (whole blocks of
// queries) where possible.
constexpr int64_t rows_at_once(int64_t rows, int64_t row_elements) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int64_t count = std::min(rows, std::max<int64_t>(1, kBytes / std::max<int64_t>(1, row_elements * 4)));
  return count < 64 || count == rows ? count : count / 64 * 64;
}

// Queries whose logits are held at a time. At 128K keys it is 512 queries, whose rows just fill an H200 in topk_select.
constexpr int64_t queries_at_once(int64_t queries, int64_t keys) { return rows_at_once(queries, keys); }

// The columns of rows that start 16-byte aligned.
constexpr int64_t aligned_columns(int64_t columns) { return (columns + 3) / 4 * 4; }

// Whether only logits above a bar are kept: where all of them would take more than one run, of queries enough to fill
// the GPU, and few of them are above it.
constexpr bool keeps_candidates(int64_t queries, int64_t keys, int64_t heads, int64_t topk) {
  constexpr int64_t kFewestKeys = 1 << 14;
  return heads >= 16 && queries >= 512 && queries_at_once(queries, keys) < queries &&
         keys >= std::max(kFewestKeys, 24 * topk) && keys <= kMaxKeys;
}

}  // namespace dsa::indexer_topk
