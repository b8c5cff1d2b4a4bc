// Scatter-add into rows of keys, with a bf16 result: common to the gradients of keys that lists of ids select. No
// torch, no CUDA headers.
//
// By default, kernels add to fp32 sums in any order (tiles/scatter.cuh, add_rows). In a deterministic call they store
// each slot's addend as a row of its own (store_rows), for as many slots as there is room for; the slots are then
// sorted by key, and each key's rows are added up in slot order, segments of them in parallel.
#pragma once

#include <cstdint>

namespace dsa::key_sums {

// One thread adds up 8 columns of a key's rows sequentially. A key with many slots is cut into parts of kSegment, so
// that a key that every slot lists takes as long as kSegment slots plus as many parts as there are.
inline constexpr int kSegment = 512;
// Bound on the parts of all cut keys: in each segment of sorted slots at most two begin, one of a key that began before
// and another key's first. With fewer slots no key is cut.
constexpr int64_t max_parts(int64_t slots) {
  return slots < 2 * kSegment ? 0 : 2 * ((slots + kSegment - 1) / kSegment);
}

struct Params {
  void* result;  // bf16 [keys, columns]
  float* sums;   // like result, in the order of add_rows; deterministic calls use them only across several launches
  int64_t keys;
  int columns;  // a multiple of 32
  int device;

  // Deterministic calls only.
  void* rows;              // bf16 [..., columns] in the order of store_rows
  unsigned* slot_keys[2];  // [slots]: their keys, unsorted and sorted; `keys` for slots that add nothing
  unsigned* slot_rows[2];  // [slots]: their first rows, in the same order
  int blocks;              // rows per slot, `block_stride` apart
  int64_t block_stride;
  unsigned* key_starts;  // [keys + 1]: the first sorted slot of each key
  float* part_sums;      // [max_parts, columns]
  unsigned* parts_done;  // [max_parts, columns / 8]: counter of finished parts, at the index of the key's first part
  void* sort_space;      // scratch of the radix sort
  int64_t sort_bytes;
};

// Each launches on `stream` (a cudaStream_t), and returns null, or a text that says what failed.
const char* clear_sums(const Params& params, void* stream);
const char* round_sums(const Params& params, void* stream);
// Adds up the rows of `slots` slots, whose keys and rows are listed; the last launch also rounds.
const char* sum_rows(const Params& params, int slots, bool is_first, bool is_last, void* stream);
// Writes the zero result of a call without slots.
const char* clear_result(const Params& params, void* stream);

// The size of sort_space.
int64_t sort_bytes(int64_t slots, int64_t keys);

}  // namespace dsa::key_sums
