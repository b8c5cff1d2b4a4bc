// How many queries are scored at a time, before their keys are selected, and whether only candidates are stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dsa::indexer_topk {

inline constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;

// Their logits take at most 256 MiB, unless one query's take more. A multiple of 64 (whole blocks of queries) where
// possible. At 128K keys it is 512 queries, whose rows just fill an H200 in topk_select.
constexpr int64_t queries_at_once(int64_t queries, int64_t keys) {
  const int64_t count = std::min(queries, std::max<int64_t>(1, kWorkspaceBytes / std::max<int64_t>(1, keys * 4)));
  return count < 64 || count == queries ? count : count / 64 * 64;
}

inline constexpr int kSampledPart = 64;      // consecutive keys of the sample
inline constexpr int kMaxSampled = 8192;     // keys in the sample, at most
inline constexpr int kMaxCandidates = 8192;  // of a query
inline constexpr int kMinFilterHeads = 16;   // with fewer, comparing costs more than storing
inline constexpr int kSampleList = 640;      // candidates of a query in the sample, at most

// Selection from candidates: a sample of the keys gives a bar for each query, and of the other keys only those whose
// logits exceed it are stored.
struct FilterPlan {
  int period = 0;    // the first kSampledPart of every so many keys are sampled; 0: store all logits
  int sampled = 0;   // keys in the sample
  int capacity = 0;  // of a list of candidates
  int queries = 0;   // at a time

  // A visit of a CTA to a block of queries has lists of its own. A block and the CTAs that visit it follow each other,
  // so the number of the block and that of the CTA add up to a number of the visit.
  static constexpr int64_t visits(int64_t blocks, int num_sms) { return blocks + num_sms; }
};

// `block_queries`: queries that a CTA scores together.
inline FilterPlan plan_filter(int64_t queries, int64_t keys, int heads, int topk, int block_queries, int num_sms) {
  constexpr int64_t kMinKeys = 16384, kMinLogits = int64_t{1} << 26;
  if (heads < kMinFilterHeads || keys < kMinKeys || keys < 6 * topk || queries * keys < kMinLogits) return {};
  FilterPlan plan{.period = 16 * kSampledPart};
  const auto sampled = [&] { return ((keys - kSampledPart) / plan.period + 1) * kSampledPart; };
  while (sampled() > kMaxSampled) plan.period *= 2;
  plan.sampled = static_cast<int>(sampled());

  // Room for what exceeds the lowest bar that the kernel chooses (`bar_rank`) and six standard deviations more; then
  // the bar leaves as much room above topk as below the capacity.
  const double ratio = plan.period / kSampledPart, expected = topk / ratio;
  const double rank = expected + 6 * std::sqrt(expected) + 3;
  const double least = std::max(ratio * (rank + 6 * std::sqrt(rank)), 2.0 * plan.period);
  if (least > kMaxCandidates) return {};
  plan.capacity = std::clamp(7 * topk / 2, (static_cast<int>(least) + 127) / 128 * 128, kMaxCandidates);

  constexpr int64_t kEntryBytes = 8;
  const int64_t per_query = plan.sampled * 4 + (kSampleList + plan.capacity) * kEntryBytes + 64;
  const int64_t shared = int64_t{num_sms} * block_queries * (plan.capacity * kEntryBytes + 4);
  const int64_t room = (kWorkspaceBytes - shared) / per_query / 64 * 64;
  if (room < 1024) return {};
  // Runs of equal length.
  const int64_t runs = (queries + room - 1) / room;
  plan.queries = static_cast<int>(std::min(room, ((queries + runs - 1) / runs + 63) / 64 * 64));
  return plan;
}

}  // namespace dsa::indexer_topk
