// How many queries are processed at a time, and how.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/indexer/indexer_logits/sample.h"

namespace dsa::indexer_topk {

using indexer_logits::kSampleEvery, indexer_logits::sampled, indexer_logits::key_of_sample;

// The longest row whose selected keys can be put in order in shared memory, and that of the smaller kernel.
inline constexpr int kMaxKeys = 1 << 20, kMaxKeysOfSmall = 1 << 17;

constexpr int square_root(int x) {
  int root = 0;
  while ((root + 1) * (root + 1) <= x) ++root;
  return root;
}

// The bar is the logit of this rank in the sample: of the topk best keys so many are hardly ever sampled, five standard
// deviations above the mean.
constexpr int rank_of_bar(int topk) {
  const int mean = (topk + kSampleEvery - 1) / kSampleEvery;
  return mean + 5 * square_root(mean) + 4;
}

// Places for the keys above the bar: six standard deviations more than there are on average.
constexpr int max_candidates(int topk) {
  const int rank = rank_of_bar(topk);
  return (kSampleEvery * (rank + 6 * (square_root(rank) + 1)) + 63) / 64 * 64;
}

// Rows of so many 4-byte elements that fill at most 256 MiB, but at least one. A multiple of 64 (whole blocks of
// queries) where possible. At 128K columns it is 512 rows, which just fill an H200 in topk_select.
constexpr int64_t rows_at_once(int64_t rows, int64_t row_elements) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int64_t count = std::min(rows, std::max<int64_t>(1, kBytes / std::max<int64_t>(1, row_elements * 4)));
  return count < 64 || count == rows ? count : count / 64 * 64;
}

// Whether only logits above a bar are kept: where all of them would take more than one run, of queries enough to fill
// the GPU, and few of them are above it.
constexpr bool keeps_candidates(int64_t queries, int64_t keys, int64_t heads, int64_t topk) {
  constexpr int64_t kFewestKeys = 1 << 14;
  return heads >= 16 && queries >= 512 && rows_at_once(queries, keys) < queries &&
         keys >= std::max(kFewestKeys, 24 * topk) && keys <= kMaxKeys;
}

}  // namespace dsa::indexer_topk
