// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/block_sparse/block_sparse_attn_bwd/plan.h"
#include "ops/block_sparse/params.h"

namespace dsa::block_sparse_attn_bwd {

struct Params : block_sparse::Problem {
  block_sparse::Heads dout, out, dq;  // like q
  block_sparse::Heads dk, dv;         // like k
  const float *lse, *dlse;            // [batch, heads, seq_q]; dlse may be null
  Plan plan;
  int max_units;

  // Scratch. Per block of queries: the bases of its rows' probabilities, then their delta.
  float* rows;  // [batch, heads, q_blocks, 2, kBlock]
  // The slots that list a visible block j of keys, ascending: those from offsets[.., j] on.
  int* offsets;  // [batch, heads, kv_blocks + 1]
  int* listing;  // [batch, heads, q_blocks * slots]: slots of the head's lists, which follow each other
  int* longest;  // [batch, heads]: the length of the longest list
  // Tiles of dS [keys, queries] before the scale; their queries are in the order of stored_query.
  char* gradients;  // [buffers, capacity, kPairBytes]
  // Sums of dk and dv that the next part of a head continues, in fragment order. Heads take turns: an item waits until
  // the unit before has added to its block.
  float* sums;    // [kv_blocks, 2, kBlock, columns]
  int* counters;  // [number_of_counters]: of progress
  // The next place in the order of work: the first two counters.
  unsigned long long* next_place;
  // How many items of a unit are done.
  constexpr int* keys_done(int unit) const { return counters + 2 + unit; }
  constexpr int* queries_done(int unit) const { return counters + 2 + max_units + unit; }
  // The number of units that are done with the sums of a block of keys.
  constexpr int* units_summed(int block) const { return counters + 2 + 2 * max_units + block; }
};

constexpr int64_t number_of_counters(const Params& p) { return 2 + 2 * int64_t{p.max_units} + p.kv_blocks; }

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::block_sparse_attn_bwd
