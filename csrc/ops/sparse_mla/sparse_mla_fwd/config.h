// The legal shapes of the sparse MLA forward kernel, and their stages and register budgets.
#pragma once

#include "plan.h"

namespace dsa::sparse_mla_fwd {

struct Config {
  int d_qk, d_v;
  int heads;                             // per CTA
  int front_stages, back_stages;         // stages of the two halves of a tile
  int value_registers, score_registers;  // per thread, by role
  bool is_paged = false;                 // keys are in the pages of a cache
  bool is_merged = false;  // items: wide, runs of queries whose lists are merged; narrow, the other queries
};

inline constexpr Config kConfigs[] = {
    // d_qk, d_v, heads, front and back stages, value and score registers
    // clang-format off
    {576, 512, kBlockHeads, 3, 3, 160, 184},
    {512, 512, kBlockHeads, 3, 3, 160, 184},
    {576, 512, 32, 3, 2, 160, 184},
    {512, 512, 32, 3, 2, 160, 184},
    {576, 512, 16, 3, 2, 160, 184},
    {512, 512, 16, 3, 2, 160, 184},
    // clang-format on
};

inline constexpr int kThreads = 384;  // two value warpgroups, one score warpgroup
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kMaxRegisters = 3 * 168;  // per thread at launch, summed over the three warpgroups

// Key columns beyond d_v, the tail; the queries' tail stays in shared memory.
constexpr int tail_columns(const Config& c) { return c.d_qk - c.d_v; }
// Few heads become columns (N), not rows (M), of the products.
constexpr bool is_narrow(const Config& c) { return c.heads < kBlockHeads; }

// How a full stage is signaled. On landing: the copies themselves arrive on the barrier, and readers fence before wgmma
// reads. Otherwise the copying threads wait, fence and arrive, one tile later but off the readers' critical path.
constexpr bool signals_on_landing(const Config& c) { return is_narrow(c); }

constexpr Config with_pages(Config c) {
  c.is_paged = true;
  return c;
}

constexpr Config with_merged_lists(Config c) {
  c.is_merged = true;
  return c;
}

constexpr bool all_fit() {
  for (const Config& c : kConfigs) {
    if (2 * c.value_registers + c.score_registers > kMaxRegisters) return false;
  }
  return true;
}
static_assert(all_fit(), "a config exceeds Hopper's registers");

}  // namespace dsa::sparse_mla_fwd
