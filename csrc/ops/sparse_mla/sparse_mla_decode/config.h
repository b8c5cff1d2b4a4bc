// The instances of the sparse MLA decode kernel.
#pragma once

#include "ops/sparse_mla/packed_keys.h"
#include "plan.h"

namespace dsa::sparse_mla_decode {

using namespace dsa::sparse_mla;

struct Config {
  int d_qk;
  int heads;  // of an item
  bool is_packed;
};

inline constexpr int kValueColumns = 512;
inline constexpr int kStages = 2;     // of tiles of values
inline constexpr int kThreads = 384;  // two value warpgroups, one score warpgroup; each needs all 168 registers
constexpr int tail_columns(const Config& c) { return c.d_qk - kValueColumns; }
constexpr int row_bytes(const Config& c) { return c.is_packed ? packed_bytes(c.d_qk) : 2 * c.d_qk; }

}  // namespace dsa::sparse_mla_decode
