// Which keys are visible to a query.
#pragma once

#include <cstdint>

namespace dsa::tiles {

// The only masking rule: ids in [begin, end) are visible, 0 <= begin <= end; a negative id is padding.
struct VisibleIds {
  int begin, end;

  __device__ __forceinline__ bool has(int id) const {
    return static_cast<unsigned>(id) - static_cast<unsigned>(begin) < static_cast<unsigned>(end - begin);
  }
  __device__ __forceinline__ bool any() const { return begin < end; }
};

// What query `s` of sequence `b` sees: the keys within its bounds, or all keys, or with causal masking those complete
// at its position.
template <class Problem>
__device__ __forceinline__ VisibleIds visible_ids(const Problem& p, int b, int s) {
  if (p.starts != nullptr) {
    const int begin = max(0, p.starts[b * p.starts_stride_b + s * p.starts_stride_s]);
    return {begin, max(begin, min(p.seq_kv, p.ends[b * p.ends_stride_b + s * p.ends_stride_s]))};
  }
  if (!p.causal) return {0, p.seq_kv};
  const int64_t end = (p.q_start + s + 1) / p.positions_per_key;
  return {0, end < p.seq_kv ? static_cast<int>(end) : p.seq_kv};
}

// The leading slots of a query that are in use: all of them, or as many as its entry of topk_length says.
template <class Problem>
__device__ __forceinline__ int used_slots(const Problem& p, int b, int s) {
  if (p.topk_length == nullptr) return p.topk;
  return max(0, min(p.topk_length[b * p.topk_length_stride_b + s * p.topk_length_stride_s], p.topk));
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
