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
  int percent;   // of the tiles of a run's lists, the most that the merged list may have
  int first_run, runs;
  unsigned* entries;  // [runs, capacity], ascending by id
  int* counts;        // [runs]: entries in use; negative if the run is not merged
  int* items;         // [runs * queries]: index of [batch, seq_q, groups] of a query or, complemented, of a run's first
  int* item_counts;   // [2]: merged runs, queries of the others
};

// What a run must fulfill to be merged, besides that it pays and no list repeats a key.
struct Conditions {
  // A list's visible ids come first, and ascend: an entry's place among those of a query is its slot.
  bool in_order = false;
  // The numbers of listed keys are finite, and those of q and dout if dout is given. If rows of several queries are
  // multiplied by them, a zero of one query times a number of another that is not finite would be NaN.
  bool finite = false;
  const void* dout = nullptr;  // bf16 [batch, seq_q, heads, d_v], contiguous
  int d_v = 0;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* merge(const listed_keys::Problem& problem, const Lists& lists, const Conditions& conditions, void* stream);

}  // namespace dsa::merged_lists
