// How the work is divided among CTAs: pure host functions, tested without a GPU.
#pragma once

#include <cstdint>

namespace dsa::sparse_mla_decode {

inline constexpr int kTileKeys = 64;
inline constexpr int kHeadBlocks[] = {64, 32, 16};  // heads of a CTA
inline constexpr int kMaxSplits = 32;

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Plan {
  int block_heads;  // heads of a work item
  int splits;       // parts that each token's keys are split into
};

// Estimated clocks of a tile of 64 keys, by heads of the item.
inline constexpr int64_t tile_clocks(int block_heads) {
  return block_heads == 64 ? 2600 : block_heads == 32 ? 1900 : 1600;
}

// Estimated clocks of a call in which each SM processes one item (token, block of heads, part of its keys) at a time.
inline int64_t plan_clocks(const Plan& plan, int64_t tokens, int heads, int topk, int num_sms) {
  constexpr int64_t kStart = 2500, kCombine = 3000;  // of an item; of the kernel that combines parts
  constexpr int64_t kBytesPerClock = 20;             // of an SM, to write parts and to read them again
  const int64_t items = tokens * ceil_div(heads, plan.block_heads) * plan.splits;
  const int64_t tiles = ceil_div(ceil_div(topk, kTileKeys), plan.splits);
  const int64_t clocks = ceil_div(items, num_sms) * (kStart + tiles * tile_clocks(plan.block_heads));
  if (plan.splits == 1) return clocks;
  const int64_t bytes = tokens * heads * plan.splits * 512 * 4;
  return clocks + kCombine + 2 * bytes / (kBytesPerClock * num_sms);
}

// The fastest plan by this estimate. With batch_invariant it does not depend on the number of tokens, and keys are not
// split.
inline Plan make_plan(int64_t tokens, int heads, int topk, int num_sms, bool batch_invariant) {
  Plan best{heads <= 16 ? 16 : heads <= 32 ? 32 : 64, 1};
  if (batch_invariant) return best;
  const int64_t tiles = ceil_div(topk, kTileKeys);
  int64_t fewest = plan_clocks(best, tokens, heads, topk, num_sms);
  for (int block_heads : kHeadBlocks) {
    if (block_heads / 2 >= heads) continue;
    for (int splits = 1; splits <= kMaxSplits && splits <= tiles; ++splits) {
      if (splits > 1 && tokens * ceil_div(heads, block_heads) * (splits - 1) >= num_sms) break;
      const Plan plan{block_heads, splits};
      const int64_t clocks = plan_clocks(plan, tokens, heads, topk, num_sms);
      if (clocks < fewest) best = plan, fewest = clocks;
    }
  }
  return best;
}

}  // namespace dsa::sparse_mla_decode
