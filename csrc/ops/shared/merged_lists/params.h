// Merges the lists of runs of neighboring queries, so that a key that several queries list is read, and added to, once.
// No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/shared/listed_keys/params.h"
#include "ops/shared/merged_lists/config.h"

namespace dsa::merged_lists {

// The runs [first_run, first_run + runs) of one launch, in the order of [batch, runs_of_sequence, groups], and its
// items: the merged runs, then the queries of the others.
struct Lists {
  int queries;   // of a run
  int capacity;  // entries_of_run
  int first_run, runs;
  unsigned* entries;  // [runs, capacity], ascending by id
  int* counts;        // [runs]: entries in use; negative if the run is not merged
  int* items;         // [runs * queries]: index of [batch, seq_q, groups] of a query or, complemented, of a run's first
  int* item_count;    // [1]
};

// Where rows are summed that belong to several queries, a zero of one query times an infinite number of another is NaN.
// So runs with a number that is not finite are not merged. Not used if unfit_keys is null.
struct Operands {
  const void* dout;  // bf16 [batch, seq_q, heads, d_v], contiguous
  int d_v;
  unsigned* unfit_keys;  // [batch, groups, words_of_keys]: a bit for each key with a number that is not finite
};

constexpr int64_t words_of_keys(int64_t seq_kv) { return (seq_kv + 31) / 32; }

// Each launches on `stream` (a cudaStream_t), and returns null, or a text that says what failed. find_unfit_keys comes
// first.
const char* find_unfit_keys(const listed_keys::Problem& problem, const Operands& operands, void* stream);
const char* merge(const listed_keys::Problem& problem, const Lists& lists, const Operands& operands, void* stream);

}  // namespace dsa::merged_lists
