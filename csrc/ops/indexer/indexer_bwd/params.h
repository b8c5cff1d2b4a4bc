// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/shared/key_sums/params.h"

namespace dsa::indexer_bwd {

struct Params {
  const void* q;         // bf16 [seq, heads, dim]
  const void* k;         // bf16 [seq_kv, dim]
  const float* weights;  // [seq, heads]
  const float* dscores;  // [seq, slots]
  const int* indices;    // [seq, slots], or null with `starts`
  const int* starts;     // [seq], null with `indices`: slot i is key i, visible from here on
  const int* ends;       // like starts: keys from here on are not visible

  // Strides in elements; rows of q, k, dscores and indices are dense.
  int64_t q_stride_s, q_stride_h, k_stride, weights_stride_s, weights_stride_h, dscores_stride, indices_stride;
  int64_t starts_stride, ends_stride;

  void* dq;             // bf16 [seq, heads, dim], contiguous
  key_sums::Params dk;  // [seq_kv, dim]; slots and rows are the entries of a launch
  float* dweights;      // [seq, heads], contiguous

  // The merged keys of each group of queries; repetitions within a query's list are entries of their own.
  int* entries;       // [groups of a launch, capacity]: ids, then -1 up to a whole tile
  void* gradients;    // bf16 [groups of a launch, tiles, queries of a group, 64]: dscores, 0 if not listed
  int* counts;        // [groups of a launch]: number of entries
  unsigned* listing;  // [groups of a launch]: bit i: query i of the group has an entry
  int capacity;       // entries per group, a multiple of a tile's keys

  int seq, seq_kv, heads, dim, slots;
  int groups_at_once;        // per launch
  int first_query, queries;  // of this launch; first_query begins a group
  int device, num_sms;
  bool deterministic;
  bool spread;  // groups start at different tiles
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(Params params, void* stream);

}  // namespace dsa::indexer_bwd
