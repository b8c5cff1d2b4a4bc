// Work distribution: pure functions of host and device, tested without a GPU.
//
// Gradients of queries read what gradients of keys have stored: a tile of dS for each pair of a query block and a block
// of keys that it lists. So that only a bounded number of tiles is stored at a time, work is divided into units of some
// heads of keys, or of some of the query blocks of one head. Tiles of a unit are in one of a few buffers, which the
// units use in turn. Streams take items (blocks of keys, query blocks) from a counter in an order in which everything
// that an item waits for comes before it: the gradients of keys of its unit, and the unit that had the buffer before.
// Each half of a unit's query blocks is taken together with half of the key blocks of a later unit.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define DSA_HOST_DEVICE __host__ __device__
#else
#define DSA_HOST_DEVICE
#endif

namespace dsa::block_sparse_attn_bwd {

inline constexpr int kPairBytes = 64 * 64 * 2;
// All buffers together have at most so many bytes, unless a single list is longer.
inline constexpr int64_t kMaxBytes = int64_t{1} << 31;
// With three buffers, nobody waits if all items take equally long; more of them allow for lists of different lengths.
inline constexpr int kMinBuffers = 3, kMaxBuffers = 4;

constexpr DSA_HOST_DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

// What the host knows.
struct Plan {
  int kv_heads;      // of all batches
  int kv_blocks;     // items of a head for gradients of keys
  int query_blocks;  // of all query heads of a head of keys: its items for gradients of queries
  int heads_wanted;  // heads of keys in a unit, if they fit
  int capacity;      // tiles in a buffer, at least one query block's
  int buffers;       // at least kMinBuffers, or as many as there are units
};

struct Work {
  bool for_keys;
  int unit;
  int head;   // of keys, of all batches
  int block;  // of keys; or of queries, among those of the head
};

// The units, if no query block lists more than `longest` blocks.
class Units {
  const Plan& plan_;
  int heads_;   // of a unit
  int parts_;   // units of a head; 1 if units have whole heads
  int blocks_;  // query blocks of such a part
  int stride_;  // tiles from one query block to the next

 public:
  DSA_HOST_DEVICE constexpr Units(const Plan& plan, int longest)
      : plan_(plan), heads_(1), parts_(1), blocks_(plan.query_blocks), stride_(longest > 1 ? longest : 1) {
    const int fitting = plan.capacity / stride_;  // query blocks
    if (fitting < plan.query_blocks) {
      parts_ = divide_up(plan.query_blocks, fitting);
      blocks_ = divide_up(plan.query_blocks, parts_);
    } else if (fitting / plan.query_blocks < plan.heads_wanted) {
      heads_ = fitting / plan.query_blocks;
    } else {
      heads_ = plan.heads_wanted;
    }
  }

  DSA_HOST_DEVICE constexpr int count() const { return divide_up(plan_.kv_heads, heads_) * parts_; }
  DSA_HOST_DEVICE constexpr bool has_parts() const { return parts_ > 1; }
  DSA_HOST_DEVICE constexpr bool is_first_part(int unit) const { return unit % parts_ == 0; }
  DSA_HOST_DEVICE constexpr bool is_last_part(int unit) const { return unit % parts_ == parts_ - 1; }

  DSA_HOST_DEVICE constexpr int first_head(int unit) const { return unit / parts_ * heads_; }
  DSA_HOST_DEVICE constexpr int heads(int unit) const {
    const int left = plan_.kv_heads - first_head(unit);
    return left < heads_ ? left : heads_;
  }
  // The query blocks of a unit, among those of each of its heads.
  DSA_HOST_DEVICE constexpr int first_block(int unit) const { return unit % parts_ * blocks_; }
  DSA_HOST_DEVICE constexpr int end_block(int unit) const {
    const int end = first_block(unit) + blocks_;
    return end < plan_.query_blocks ? end : plan_.query_blocks;
  }

  // Items of each kind.
  DSA_HOST_DEVICE constexpr int key_items(int unit) const { return heads(unit) * plan_.kv_blocks; }
  DSA_HOST_DEVICE constexpr int query_items(int unit) const {
    return heads(unit) * (end_block(unit) - first_block(unit));
  }

  // Half units by which gradients of queries come later than those of keys.
  DSA_HOST_DEVICE constexpr int lag() const {
    return 2 * (plan_.buffers < kMinBuffers ? kMinBuffers : plan_.buffers) - 3;
  }
  // The order of work has some places without an item.
  DSA_HOST_DEVICE constexpr int64_t places() const {
    return static_cast<int64_t>(2 * count() + lag()) * (key_half() + query_half());
  }
  // Returns false if there is no item at this place.
  DSA_HOST_DEVICE constexpr bool find(int64_t place, Work& work) const {
    const int keys = key_half(), queries = query_half(), both = keys + queries;
    const int half = static_cast<int>(place / both), i = static_cast<int>(place % both);
    // Evenly mixed: place i is a query block's if the number of those increases there.
    const int queries_before = static_cast<int>(static_cast<int64_t>(i) * queries / both);
    work.for_keys = static_cast<int64_t>(i + 1) * queries / both == queries_before;
    const int own_half = work.for_keys ? half : half - lag();
    if (own_half < 0 || own_half >= 2 * count()) return false;
    work.unit = own_half / 2;
    const int item = work.for_keys ? own_half % 2 * keys + i - queries_before : own_half % 2 * queries + queries_before;
    if (item >= (work.for_keys ? key_items(work.unit) : query_items(work.unit))) return false;
    const int per_head = work.for_keys ? plan_.kv_blocks : blocks_;
    work.head = first_head(work.unit) + item / per_head;
    work.block = item % per_head + (work.for_keys ? 0 : first_block(work.unit));
    return true;
  }

  // Of a query block of a unit: its first tile among those of all buffers.
  DSA_HOST_DEVICE constexpr int first_tile(int unit, int head, int block) const {
    const int item = (head - first_head(unit)) * blocks_ + block - first_block(unit);
    return unit % plan_.buffers * plan_.capacity + item * stride_;
  }

 private:
  DSA_HOST_DEVICE constexpr int key_half() const { return divide_up(heads_ * plan_.kv_blocks, 2); }
  DSA_HOST_DEVICE constexpr int query_half() const { return divide_up(heads_ * blocks_, 2); }
};

// For lists of `slots` slots.
inline Plan plan_work(int kv_heads, int kv_blocks, int query_blocks, int slots, int num_sms) {
  constexpr int64_t kMaxPairs = kMaxBytes / kPairBytes;
  const int items_wanted = 5 * num_sms;  // several for each stream
  const int heads = static_cast<int>((items_wanted - 1) / (int64_t{kv_blocks} + query_blocks)) + 1;
  Plan plan{kv_heads, kv_blocks, query_blocks, std::min(kv_heads, heads), slots, kMinBuffers};
  const int64_t pairs = int64_t{query_blocks} * slots;  // of a head
  const int64_t fitting = std::min(kMaxPairs / kMinBuffers, pairs * plan.heads_wanted);
  plan.capacity = std::max(slots, static_cast<int>(fitting));
  const int units = Units(plan, slots).count(), buffers = static_cast<int>(kMaxPairs / plan.capacity);
  plan.buffers = std::min(units, std::clamp(buffers, kMinBuffers, kMaxBuffers));
  return plan;
}

}  // namespace dsa::block_sparse_attn_bwd
