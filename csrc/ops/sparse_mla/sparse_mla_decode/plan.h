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

// Whether the wide kernel computes a plan: 64 heads of packed keys. It stores parts in fp16, the others in fp32.
inline constexpr bool is_wide(const Plan& plan, bool is_packed) { return is_packed && plan.block_heads == 64; }

// The smallest block that holds all heads, or the largest one. bf16 keys know no other: their kernel is that of
// sparse_mla_fwd.
inline constexpr int natural_block(int heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// Of a tile of 64 packed keys for 64 heads: of a CTA alone, or of one of a pair, which unpacks half of them.
inline constexpr int64_t kAloneClocks = 6000, kPairedClocks = 5600;

// Estimated clocks of a tile of 64 keys, by heads of the item.
inline constexpr int64_t tile_clocks(int block_heads, int heads, bool is_packed) {
  if (is_packed && block_heads == 64) return heads > 64 ? kPairedClocks : kAloneClocks;
  if (is_packed) return block_heads == 32 ? 4880 : 3990;
  return block_heads == 64 ? 3300 : block_heads == 32 ? 2300 : 2000;
}

// Estimated clocks of a call in which each SM processes one item (token, block of heads, part of its keys) at a time.
inline int64_t plan_clocks(const Plan& plan, int64_t tokens, int heads, int topk, int num_sms, bool is_packed) {
  constexpr int64_t kStart = 2500, kCombine = 3000;  // of an item; of the kernel that combines parts
  constexpr int64_t kBytesPerClock = 20;             // of an SM, to write parts and to read them again
  constexpr int64_t kNoRoom = 6000;                  // where CTAs on all SMs leave none for a kernel to start early
  const int64_t items = tokens * ceil_div(heads, plan.block_heads) * plan.splits;
  const int64_t tiles = ceil_div(ceil_div(topk, kTileKeys), plan.splits);
  const int64_t clocks = ceil_div(items, num_sms) * (kStart + tiles * tile_clocks(plan.block_heads, heads, is_packed));
  if (plan.splits == 1) return clocks;
  const int64_t bytes = tokens * heads * plan.splits * 512 * (is_wide(plan, is_packed) ? 2 : 4);
  return clocks + kCombine + (items * 8 > num_sms * 7 ? kNoRoom : 0) + 2 * bytes / (kBytesPerClock * num_sms);
}

// The fastest plan by this estimate. With batch_invariant it does not depend on the number of tokens, and keys are not
// split.
inline Plan make_plan(int64_t tokens, int heads, int topk, int num_sms, bool is_packed, bool batch_invariant) {
  const int natural = natural_block(heads);
  Plan best{natural, 1};
  if (batch_invariant) return best;
  const int64_t tiles = ceil_div(topk, kTileKeys);
  int64_t fewest = plan_clocks(best, tokens, heads, topk, num_sms, is_packed);
  for (int block_heads : kHeadBlocks) {
    if (block_heads > natural || (block_heads < natural && !is_packed)) continue;
    const int64_t items = tokens * ceil_div(heads, block_heads);
    // The fewest parts of so many tiles.
    for (int64_t splits = 1; splits <= kMaxSplits && items * (splits - 1) < num_sms;) {
      const Plan plan{block_heads, static_cast<int>(splits)};
      const int64_t clocks = plan_clocks(plan, tokens, heads, topk, num_sms, is_packed);
      if (clocks < fewest) best = plan, fewest = clocks;
      const int64_t part = ceil_div(tiles, splits);
      if (part == 1) break;
      splits = ceil_div(tiles, part - 1);
    }
  }
  return best;
}

}  // namespace dsa::sparse_mla_decode
