// A sample of the keys, and how much of it says which of the other keys may be selected.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsa::indexer_topk {

// Every 17th key is sampled: no multiple of what repeats in texts, images or batches.
inline constexpr int kSampleEvery = 17;
// The longest row whose selected keys can be put in order in shared memory, and that of the smaller kernel.
inline constexpr int kMaxKeys = 1 << 20, kMaxKeysOfSmall = 1 << 17;

// Sampled keys among the first `keys`. Key i is sampled key i / 17 if 17 divides i, else one of the others.
constexpr int sampled(int keys) { return static_cast<int>((int64_t{keys} + kSampleEvery - 1) / kSampleEvery); }
constexpr int key_of_sample(int i) { return i * kSampleEvery; }
constexpr int key_of_other(int i) { return i + i / (kSampleEvery - 1) + 1; }

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
  constexpr int kMost = 8192;  // that a CTA of the last kernel holds
  const int rank = rank_of_bar(topk);
  return std::min(kMost, (kSampleEvery * (rank + 6 * (square_root(rank) + 1)) + 63) / 64 * 64);
}

}  // namespace dsa::indexer_topk
