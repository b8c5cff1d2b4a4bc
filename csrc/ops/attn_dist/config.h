// Sizes of the kernel of attn_dist.
#pragma once

#include <algorithm>

namespace dsa::attn_dist {

inline constexpr int kBlockHeads = 64;  // that one partial sum is of
inline constexpr int kScoreWarpgroups = 2, kThreads = (kScoreWarpgroups + 1) * 128;
inline constexpr int kScoreRegisters = 200, kGatherRegisters = 88;
inline constexpr int kTileKeys = 64, kChunkColumns = 64;
inline constexpr int kSharedBytes = 225 * 1024;  // for Q and keys

// How one shape is computed: the heads of a group, rounded up, are the columns of the products.
struct Config {
  int d_qk, heads;

  constexpr int chunks() const { return d_qk / kChunkColumns; }
  // Chunks of keys that there is room for; more than three tiles would only wait.
  constexpr int slots() const {
    const int q_bytes = heads * d_qk * 2, slot_bytes = kTileKeys * kChunkColumns * 2;
    return std::min(3 * chunks(), (kSharedBytes - q_bytes) / slot_bytes);
  }
};

inline constexpr Config kConfigs[] = {
    // d_qk, heads
    {576, 16}, {576, 32}, {576, 64}, {576, 128}, {512, 16}, {512, 32}, {512, 64}, {512, 128},
};

}  // namespace dsa::attn_dist
