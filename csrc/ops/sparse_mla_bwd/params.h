// What crosses from the host to the kernels. No torch, no CUDA headers.
#pragma once

#include "ops/sparse_mla/params.h"

namespace dsa::sparse_mla_bwd {

// A launch of the main kernel takes items [first_item, ...), each a query's heads of one group, at most kBlockHeads.
struct Params : sparse_mla::Problem {
  const void* dout;   // bf16 [batch, seq_q, heads, d_v], contiguous
  const void* out;    // like dout
  const float* lse;   // [batch, seq_q, heads], contiguous
  const float* dlse;  // like lse, or null
  void* dq;           // bf16 [batch, seq_q, heads, d_qk], contiguous
  void* dkv;          // bf16 [batch, seq_kv, groups, d_qk], contiguous
  float* d_sink;      // [heads] with a sink, else null
  float* dq_parts;    // fp32 [items beyond whole_items, parts, kBlockHeads, d_qk]
  float* sink_terms;  // like lse with a sink, else null: what each row adds to d_sink
  float* dkv_sum;     // like dkv; a deterministic call needs it only where one launch does not take all queries
  int* finished;      // [1]: CTAs that are done; null where none waits for others

  // Deterministic calls only, else null. `slots` are those of the queries and groups of one launch, `keys` those of all
  // batch elements and groups.
  void* dkv_rows;          // bf16 [items of a launch, topk, d_qk]: what each slot adds to its key
  unsigned* slot_keys[2];  // [slots]: their keys, as listed and sorted
  unsigned* slot_rows[2];  // [slots]: their first head block's rows of dkv_rows, in the same order
  unsigned* key_starts;    // [keys + 1]: where each key's sorted slots begin
  void* sort_space;        // of sort_bytes
  int64_t sort_bytes;

  int64_t queries_at_once;  // of one launch
  int first_item;
  int whole_items, parts;  // from plan_items
  bool deterministic;
  bool prefetch_sums;  // of the next tile, where few are in L2
  bool spread;         // queries begin with different tiles
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

// Bytes of sort_space.
int64_t sort_bytes(int64_t slots, int64_t keys);
// Sorts the slots of `queries` queries from first_item on by their keys, in the order of queries and slots where they
// have the same, and finds key_starts.
const char* sort_slots(const Params& params, int64_t queries, void* stream);

}  // namespace dsa::sparse_mla_bwd
