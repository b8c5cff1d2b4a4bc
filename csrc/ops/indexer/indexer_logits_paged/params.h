// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::indexer_logits_paged {

struct Params {
  const void* q;            // [batch, queries, heads, dim], e4m3 or bf16
  const void* k_cache;      // [blocks, page, dim]; for e4m3, the scales of a page follow its keys
  const float* weights;     // [batch * queries, heads]
  const int* context_lens;  // [batch, queries], or [batch]: of the last query
  const int* block_table;   // [batch, pages]; null: one sequence, of which the cache is the only page
  const int* starts;        // null, or for one sequence with only one page [queries]: first key of each query
  const float* k_scale;     // null, or scales of the only page that are not behind its keys, 16-byte aligned
  float* logits;            // [batch * queries, columns]
  int* bounds;              // null, or [2, batch * queries]: receives 0 and the length of each query
  int64_t q_stride_b, q_stride_n, q_stride_h, weights_stride;  // in elements
  int64_t cache_stride_block, cache_stride_key;                // in elements of the keys
  int64_t lens_stride_b, lens_stride_n, table_stride_b, table_stride_page, starts_stride, logits_stride;
  int batch, queries, heads, dim, blocks, page, columns;
  int max_keys;           // that a query may see: in columns, and in the table's pages; 0 if there are no blocks
  bool length_per_query;  // context_lens is [batch, queries]
  bool clean;             // write -inf where a query sees no key
  bool is_bf16;           // else e4m3
  int device;             // CUDA device index
  int num_sms;
};

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);
const char* launch_fp8(const Params& params, void* stream);
const char* launch_bf16(const Params& params, void* stream);

}  // namespace dsa::indexer_logits_paged
