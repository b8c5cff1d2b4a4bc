// How many queries are scored at a time, before their keys are selected.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_topk {

// Their logits take at most 256 MiB, unless one query's take more. A multiple of 64 (whole blocks of queries) where
// possible. At 128K keys it is 512 queries, whose rows just fill an H200 in topk_select.
constexpr int64_t queries_at_once(int64_t queries, int64_t keys) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int64_t count = std::min(queries, std::max<int64_t>(1, kBytes / std::max<int64_t>(1, keys * 4)));
  return count < 64 || count == queries ? count : count / 64 * 64;
}

}  // namespace dsa::indexer_topk
