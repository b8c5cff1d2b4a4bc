// A sample of the keys: key i is sampled key i / 17 if 17 divides i, else one of the others.
#pragma once

#include <cstdint>

namespace dsa::indexer_logits {

// No multiple of what repeats in texts, images or batches.
inline constexpr int kSampleEvery = 17;

// Sampled keys among the first `keys`.
constexpr int sampled(int keys) { return static_cast<int>((int64_t{keys} + kSampleEvery - 1) / kSampleEvery); }
constexpr int key_of_sample(int i) { return i * kSampleEvery; }
constexpr int key_of_other(int i) { return i + i / (kSampleEvery - 1) + 1; }

}  // namespace dsa::indexer_logits
