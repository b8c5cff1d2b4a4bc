// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/shared/merged_lists/params.h"
#include "ops/sparse_mla/params.h"

namespace dsa::sparse_mla_fwd {

struct Params : sparse_mla::Problem {
  void* out;           // bf16 [batch, seq_q, heads, d_v], contiguous
  float* lse;          // [batch, seq_q, heads], contiguous
  float* partial_out;  // [splits, batch, seq_q, heads, d_v] when splits > 1, else null
  float* partial_lse;  // [splits, batch, seq_q, heads] when splits > 1, else null
  int splits;          // from plan_splits
};

// The largest scores, if they are asked for, and what lse of a row without keys is.
struct Maxima {
  float* max_logits;   // like lse, or null: then `launch` takes -inf for `empty_lse`
  float* partial_max;  // like partial_lse, or null
  float empty_lse;
};

// Keys in the pages of a cache: key `id` is slot id % page of page id / page.
struct Pages {
  int64_t page_bytes, slot_bytes;  // from one page, or one slot of a page, to the next
  int page;                        // slots of a page
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, const Maxima& maxima, void* stream);

// The same for queries whose lists are merged in runs, where that pays: are_merged_forward.
const char* launch_merging(const Params& params, const merged_lists::Lists& lists, void* stream);

// The same, by programmatic dependent launch, for keys in `pages`: `params` has one group of keys and seq_kv slots, and
// strides of kv are 0. With splits > 1 the parts are left to the caller; lse of a row without keys is `empty_lse`, in
// parts too.
const char* launch_paged(const Params& params, const Pages& pages, float empty_lse, void* stream);

}  // namespace dsa::sparse_mla_fwd
