// The legal shapes of the sparse MLA backward kernel, and their tiles and register budgets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/shared/merged_lists/config.h"

namespace dsa::sparse_mla_bwd {

// Lists are merged if that leaves at most so much of their tiles: a merged tile costs up to 10 % more than one of a
// single query (measured).
inline constexpr int kMostMergedPercent = 85;

inline constexpr int kBlockK = 64;      // keys in one tile
inline constexpr int kBlockHeads = 64;  // heads in one CTA

// Blocks of heads per group. Two are a pair of CTAs.
constexpr int head_blocks(int heads, int groups) { return (heads / groups + kBlockHeads - 1) / kBlockHeads; }

enum Role { kFrontRole, kBackRole, kScoreRole };

// The columns of dkv, of the first d_v, that one role computes, `step` at a time. The front role also has the tail.
struct KeyColumns {
  int begin, end, step;
};

struct Config {
  int d_qk, d_v;
  KeyColumns key_columns[3];  // by role
  int registers[3];           // per thread, by role
  bool merged;                // rows may be several queries with few heads, whose lists are merged
};

inline constexpr Config kConfigs[] = {
    {576, 512, {{0, 64, 32}, {64, 320, 64}, {320, 512, 64}}, {208, 192, 104}, false},
    {512, 512, {{0, 192, 64}, {192, 384, 64}, {384, 512, 64}}, {200, 192, 112}, false},
    {576, 512, {{0, 64, 32}, {64, 320, 64}, {320, 512, 64}}, {208, 192, 104}, true},
    {512, 512, {{0, 192, 64}, {192, 384, 64}, {384, 512, 64}}, {200, 192, 112}, true},
};

constexpr int config_index(int d_qk, bool merged) {
  int index = 0;
  while (kConfigs[index].d_qk != d_qk || kConfigs[index].merged != merged) ++index;
  return index;
}

inline constexpr int kThreads = 384;  // two gradient warpgroups, one score warpgroup
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kMaxRegisters = 3 * 168;  // per thread at launch, summed over the three warpgroups

// How items, a query's groups, are split: the first `whole` are one CTA, or a pair of CTAs, each. The rest, which
// would leave most of the GPU idle, are split over keys into `parts` CTAs, or pairs, each.
struct Plan {
  int64_t whole;
  int parts;
};

constexpr Plan plan_items(int64_t items, int topk, int num_sms) {
  constexpr int kTilesPerPart = 2;  // at least, to pay for a CTA's start
  const int rest = static_cast<int>(items % num_sms), tiles = (topk + kBlockK - 1) / kBlockK;
  const int parts = rest == 0 ? 1 : std::min(num_sms / rest, tiles / kTilesPerPart);
  return parts > 1 ? Plan{items - rest, parts} : Plan{items, 1};
}

// CTAs of a launch with at most `most_items` items, whose number only the device knows.
constexpr int64_t most_ctas(int64_t most_items, int num_sms) { return (most_items / num_sms + 1) * num_sms; }

// Queries per launch of a deterministic call. Their rows of dkv take at most kRowBytes, unless a single query takes
// more; if there are many items, they fill whole waves of CTAs.
inline constexpr int64_t kRowBytes = int64_t{1} << 30;

constexpr int64_t queries_at_once(int64_t groups, int topk, int d_qk, int num_sms) {
  const int64_t items = kRowBytes / (int64_t{topk} * d_qk * 2);
  return std::max<int64_t>(1, (items - (items > num_sms ? items % num_sms : 0)) / groups);
}

// Queries per launch of pairs of CTAs. Their dS and, in a deterministic call, their rows of dkv, of `row_bytes` bytes
// for each slot, take at most kRowBytes, unless a single query takes more. All launches but the last one fill whole
// waves, or, with long lists, which are split by keys, an equal part of a wave.
constexpr int64_t pair_queries_at_once(int64_t queries, int groups, int topk, int row_bytes, int num_sms) {
  const int64_t wave = std::max(1, num_sms / 2 / groups), tiles = (topk + kBlockK - 1) / kBlockK;
  const int64_t bytes = groups * (tiles * (2 * kBlockHeads * kBlockK * 2) + int64_t{topk} * row_bytes);
  const int64_t fit = std::max<int64_t>(1, kRowBytes / bytes);
  const int64_t step = fit < wave ? wave / ((wave + fit - 1) / fit) : wave, room = fit / step * step;
  const int64_t launches = (queries + room - 1) / room, share = (queries + launches - 1) / launches;
  return std::min(queries, (share + step - 1) / step * step);
}

constexpr bool has_tail(const Config& c) { return c.d_qk > c.d_v; }

constexpr bool all_fit() {
  for (const Config& c : kConfigs) {
    if (c.registers[0] + c.registers[1] + c.registers[2] > kMaxRegisters) return false;
  }
  return true;
}
static_assert(all_fit(), "a config exceeds Hopper's registers");

}  // namespace dsa::sparse_mla_bwd
