// Host-to-device parameters of the selection from candidates. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/indexer/indexer_logits/params.h"

namespace dsa::indexer_topk {

// A candidate. Its list is in no order.
struct alignas(8) Candidate {
  float logit;
  int key;
};

// The lists of candidates of a run of queries. Lists of a visit: FilterPlan.
struct Lists {
  Candidate* candidates;  // [visits, block_queries, capacity], less than 2^31
  int* counts;            // [visits, block_queries]: the candidates there are, also those that had no room
  int* block_ctas;        // [blocks, 2]: the first and the last CTA that visit a block; only for blocks that see keys
  const float* bars;      // [queries]: keys whose logits are greater are candidates
  int block_queries, capacity;
  int period;  // of the sampled parts, which are left out here
};

// Of all queries: bounds in the sample, and what has to be selected once more. Of a run: the rest.
struct Params {
  Lists lists;
  const int* starts;
  const int* ends;
  int64_t starts_stride, ends_stride;
  const float* k_scale;          // null for bf16
  int* sample_starts;            // [queries]
  int* sample_ends;              // [queries]
  float* sample_scale;           // [sampled]
  const float* sample;           // [queries, sampled]: logits
  Candidate* sample_candidates;  // [queries, kSampleList]
  int* sample_counts;            // [queries]
  float* bars;                   // [queries]
  int* redo_starts;              // [queries]: bounds of the queries whose candidates are too many or too few; equal for
  int* redo_ends;                // the others
  int* indices;                  // [queries, topk]
  float* values;                 // [queries, topk]
  int queries, keys, sampled, topk, visits;
  int device;
};

// Each launches on `stream` (a cudaStream_t), and returns null, or a text that says what failed.
const char* launch_bounds(const Params& params, void* stream);  // bounds and scales of the sample
const char* launch_bars(const Params& params, void* stream);    // from the sample's logits
const char* launch_lists(const indexer_logits::Params& scores, const Lists& lists, void* stream);
const char* launch_lists_fp8(const indexer_logits::Params& scores, const Lists& lists, void* stream);
const char* launch_lists_bf16(const indexer_logits::Params& scores, const Lists& lists, void* stream);
const char* launch_select(const Params& params, void* stream);  // among the candidates

}  // namespace dsa::indexer_topk
