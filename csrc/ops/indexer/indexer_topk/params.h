// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/indexer/indexer_logits/params.h"
#include "ops/indexer/topk_select/params.h"

namespace dsa::indexer_topk {

// Some keys or all, and which of them each query sees.
struct Keys {
  char* k;         // rows of row_bytes
  float* k_scale;  // null for bf16
  int* starts;     // [seq]
  int* ends;
};

// All keys become the sampled ones and the others.
struct SplitParams {
  const char* k;
  const float* k_scale;  // null for bf16
  const int *starts, *ends;
  int64_t k_stride, starts_stride, ends_stride;  // of k in bytes
  Keys sample, others;
  int seq, seq_kv, row_bytes;
  int device;
};

// The best of a row's sample give its bar and its first candidates.
struct BarParams {
  const int* indices;           // [rows, rank]: of the sample, -1 behind the last
  const float* values;          // [rows, rank]
  float* bars;                  // -Inf if the sample has fewer
  int* any_left;                // becomes 0
  indexer_logits::Above above;  // tickets become 0
  int rows, rank;
  int device;
};

// The best topk candidates of each row. Rows of which they may not be the best of all are left for another way, by
// which only these have keys.
struct SelectParams {
  topk_select::Params results;  // starts and ends: of all keys
  indexer_logits::Above above;
  int *starts, *ends, *wanted;  // [rows], written: for the other way
  int* any_left;                // becomes 1 if there are such rows
};

// These launch on `stream` (a cudaStream_t). They return null, or a text that says what failed.
const char* launch_split(const SplitParams& params, void* stream);
const char* launch_bars(const BarParams& params, void* stream);
const char* launch_select(const SelectParams& params, void* stream);

}  // namespace dsa::indexer_topk
