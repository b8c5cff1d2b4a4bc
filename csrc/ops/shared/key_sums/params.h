// Sums over all that is added to the rows of keys, in bf16: what the gradients of keys that lists name have in common.
// No torch, no CUDA headers.
//
// Either kernels add to fp32 sums, in any order (sm90/scatter.cuh, add_rows). Or, in a deterministic call, they store
// what each slot of a list adds as a row of its own (store_rows), for as many slots as there is room for; the slots are
// sorted by key, and each key's rows added up in the order of the slots, segments of them side by side.
#pragma once

#include <cstdint>

namespace dsa::key_sums {

// One thread adds up a key's rows for 8 columns, one after the other. A key with many is cut into parts of so many
// slots, so that one that all slots list takes as long as this many, and as there are parts.
inline constexpr int kSegment = 512;
// Of all cut keys: in as many sorted slots there may begin one part of a key that began before, and the first part of
// another. A call with fewer slots cuts none.
constexpr int64_t max_parts(int64_t slots) {
  return slots < 2 * kSegment ? 0 : 2 * ((slots + kSegment - 1) / kSegment);
}

struct Params {
  void* result;  // bf16 [keys, columns]
  float* sums;   // like result, in the order of add_rows; a deterministic call needs them only for several launches
  int64_t keys;
  int columns;  // a multiple of 32
  int device;

  // Deterministic calls only.
  void* rows;              // bf16 [..., columns] in the order of store_rows
  unsigned* slot_keys[2];  // [slots]: their keys, as listed and sorted; that of slots which add nothing is `keys`
  unsigned* slot_rows[2];  // [slots]: their first rows, in the same order
  int blocks;              // rows of a slot, `block_stride` apart
  int64_t block_stride;
  unsigned* key_starts;  // [keys + 1]: where each key's sorted slots begin
  float* part_sums;      // [max_parts, columns]
  unsigned* parts_done;  // [max_parts, columns / 8]: of the key whose first part it is
  void* sort_space;      // of sort_bytes
  int64_t sort_bytes;
};

// Each launches on `stream` (a cudaStream_t), and returns null, or a text that says what failed.
const char* clear_sums(const Params& params, void* stream);
const char* round_sums(const Params& params, void* stream);
// Adds up the rows of `slots` slots, whose keys and rows are listed; then, in the last launch, rounds.
const char* sum_rows(const Params& params, int slots, bool is_first, bool is_last, void* stream);
// The result without any slots.
const char* clear_result(const Params& params, void* stream);

// Bytes of sort_space.
int64_t sort_bytes(int64_t slots, int64_t keys);

}  // namespace dsa::key_sums
