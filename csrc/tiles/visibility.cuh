// Which keys are visible to a query.
#pragma once

#include <cstdint>

namespace dsa::tiles {

// The only masking rule: ids in [0, end) are visible; a negative id is padding.
__device__ __forceinline__ bool is_visible(int id, int end) {
  return static_cast<unsigned>(id) < static_cast<unsigned>(end);
}

// Ids below the returned value are visible to query `s`: all keys, or with causal masking those complete at its
// position.
__device__ __forceinline__ int visible_end(int seq_kv, bool causal, int64_t q_start, int64_t positions_per_key, int s) {
  if (!causal) return seq_kv;
  const int64_t end = (q_start + s + 1) / positions_per_key;
  return end < seq_kv ? static_cast<int>(end) : seq_kv;
}

// The leading slots of a query that are in use: all of them, or as many as its entry of topk_length says.
__device__ __forceinline__ int used_slots(int topk, const int* g_length) {
  return g_length == nullptr ? topk : max(0, min(*g_length, topk));
}

// Of the words that publish_visible writes: whether any row of the tile is a visible key.
__device__ __forceinline__ bool any_visible(const uint32_t (&words)[4]) {
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

// The mask that publish_visible writes, for keys that are the columns of this thread's 64 x 64 accumulator: bit 8 e + i
// of `low` is column 16 i + lane % 4 * 2 + e; `high` holds the columns 8 further.
struct VisibleColumns {
  static constexpr uint32_t kAll = 0x0f0f;
  uint32_t low, high;

  __device__ __forceinline__ VisibleColumns(const uint32_t (&words)[4], int lane)
      : low(words[lane / 2 % 2] >> lane % 2 * 16 & kAll), high(words[lane / 2 % 2 + 2] >> lane % 2 * 16 & kAll) {}
  __device__ __forceinline__ bool all() const { return (low & high) == kAll; }
  // Whether the column of accumulator `i` is visible.
  __device__ __forceinline__ bool operator[](int i) const {
    return (i / 4 % 2 ? high : low) & 1u << (i % 2 * 8 + i / 8);
  }
};

}  // namespace dsa::tiles
