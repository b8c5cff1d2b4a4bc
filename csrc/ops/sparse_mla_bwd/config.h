// The legal shapes of the sparse MLA backward kernel, and what each may use of an SM.
#pragma once

namespace dsa::sparse_mla_bwd {

inline constexpr int kBlockK = 64;      // keys in one tile
inline constexpr int kBlockHeads = 64;  // heads in one CTA

enum Role { kFrontRole, kBackRole, kScoreRole };

// The columns of dkv that one role computes, `step` at a time.
struct KeyColumns {
  int begin, end, step;
};

struct Config {
  int d_qk, d_v;
  KeyColumns key_columns[3];  // by role
  int registers[3];           // of a thread, by role
};

inline constexpr Config kConfigs[] = {
    {576, 512, {{0, 128, 32}, {128, 384, 64}, {384, 576, 64}}, {208, 192, 104}},
    {512, 512, {{0, 192, 64}, {192, 384, 64}, {384, 512, 64}}, {200, 192, 112}},
};

inline constexpr int kThreads = 384;  // two gradient warpgroups, one score warpgroup
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kMaxRegisters = 3 * 168;  // three threads', one of each warpgroup, as the kernel starts

constexpr bool has_tail(const Config& c) { return c.d_qk > c.d_v; }

constexpr bool all_fit() {
  for (const Config& c : kConfigs) {
    if (c.registers[0] + c.registers[1] + c.registers[2] > kMaxRegisters) return false;
  }
  return true;
}
static_assert(all_fit(), "a config exceeds Hopper's registers");

}  // namespace dsa::sparse_mla_bwd
