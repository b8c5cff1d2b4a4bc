// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include "ops/shared/key_sums/params.h"
#include "ops/shared/merged_lists/params.h"
#include "ops/sparse_mla/params.h"

namespace dsa::sparse_mla_bwd {

// One launch of the main kernel takes items [first_item, ...), each a query's group: up to kBlockHeads heads, or twice
// as many for a pair of CTAs; or, with merged lists, the items of `lists`.
struct Params : sparse_mla::Problem {
  const void* dout;   // bf16 [batch, seq_q, heads, d_v], contiguous
  const void* out;    // like dout
  const float* lse;   // [batch, seq_q, heads], contiguous
  const float* dlse;  // like lse, or null
  void* dq;           // bf16 [batch, seq_q, heads, d_qk], contiguous
  float* d_sink;      // [heads] with a sink, else null
  void* dscores;      // bf16 [items, tiles, 2, 64 heads, 64 keys] of pairs, swizzled
  float* dq_parts;    // fp32 [items beyond whole_items, parts, kBlockHeads, d_qk]
  float* sink_terms;  // like lse with a sink, else null: each row's term of d_sink
  float* dist;        // [head blocks, batch, seq_q, groups, topk], zero: P summed over the heads of a block; or null
  int* finished;      // [1]: number of finished CTAs; null if no CTA waits for others

  // dkv [batch, seq_kv, groups, d_qk]. Slots: those of one launch's queries and groups; rows: one per slot.
  key_sums::Params dkv;

  int64_t queries_at_once;  // per launch
  int first_item;
  int whole_items, parts;  // from plan_items; with merged lists the device makes the plan
  bool deterministic;
  bool pairs;          // of CTAs: more than kBlockHeads heads a group
  bool prefetch_sums;  // of the next tile, if L2 holds few of them
  bool spread;         // queries start at different tiles

  bool merged;
  merged_lists::Lists lists;  // `runs`: per launch
  merged_lists::Conditions conditions;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::sparse_mla_bwd
