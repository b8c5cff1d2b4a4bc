// How many queries are scored before their keys are selected.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_topk {

// Their logits take no more than 256 MiB, or are those of one query. A multiple of 64 where it can be: whole blocks of
// queries. At 128K keys they are 512, whose rows just fill an H200 when they are selected from.
constexpr int64_t queries_at_once(int64_t queries, int64_t keys) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int64_t count = std::min(queries, std::max<int64_t>(1, kBytes / std::max<int64_t>(1, keys * 4)));
  return count < 64 || count == queries ? count : count / 64 * 64;
}

}  // namespace dsa::indexer_topk
