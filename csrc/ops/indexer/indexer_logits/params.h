// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::indexer_logits {

struct alignas(8) Candidate {
  float logit;
  int key;
};

// Lists of the logits above each row's bar, for indexer_topk.
struct Above {
  const float* bars;      // [seq]
  unsigned* counts;       // [seq]: candidates of each row, with those that there is no place for
  Candidate* candidates;  // [seq, max], in any order
  int max;
  unsigned* tickets;  // how many have been taken, see tickets.h; 0 at first
};

struct Params {
  const void* q;         // [seq, heads, dim], e4m3 or bf16
  const void* k;         // [seq_kv, dim], like q
  const float* weights;  // [seq, heads]
  const int* starts;     // [seq]: first key of each query
  const int* ends;       // [seq]: end of each query's keys
  const float* k_scale;  // [seq_kv], dense; null for bf16
  float* logits;         // [seq, seq_kv]
  int64_t q_stride_s, q_stride_h, k_stride, weights_stride, starts_stride, ends_stride;  // in elements
  int64_t logits_stride;
  int seq, seq_kv, heads, dim;
  const int* any_left;  // null, or nothing is done if it holds 0
  bool clean;           // write -inf outside of the bounds
  bool is_bf16;         // else e4m3
  int device;           // CUDA device index
  int num_sms;
  Above above;  // of launch_above
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);
const char* launch_fp8(const Params& params, void* stream);
const char* launch_bf16(const Params& params, void* stream);
// The same with logits above a bar listed instead of stored. k lacks the sampled keys, see sample.h;
// candidates have the numbers that keys have among all. At least 16 heads.
const char* launch_above(const Params& params, void* stream);
const char* launch_above_fp8(const Params& params, void* stream);
const char* launch_above_bf16(const Params& params, void* stream);

}  // namespace dsa::indexer_logits
