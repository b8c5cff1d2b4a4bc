// How many queries are scored before their keys are selected.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_topk {

// Their logits take no more than the results of all queries and 64 MB, or are those of one query. A multiple of 64
// where it can be: whole blocks of queries.
constexpr int64_t queries_at_once(int64_t queries, int64_t keys, int64_t topk) {
  const int64_t bytes = queries * topk * 8 + (int64_t{64} << 20);
  const int64_t count = std::min(queries, std::max<int64_t>(1, bytes / std::max<int64_t>(1, keys * 4)));
  return count < 64 || count == queries ? count : count / 64 * 64;
}

}  // namespace dsa::indexer_topk
