// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::topk_select {

// Where the tokens of a sequence are in a paged cache.
struct PageTable {
  const int* entries;          // [sequences, pages]
  const int* row_to_sequence;  // null: each sequence has `rows_per_sequence` consecutive rows
  int64_t stride_sequence, stride_page, stride_row;
  int sequences, pages, page_size, rows_per_sequence;
};

struct Params {
  const void* logits;                                 // fp32 or bf16 [rows, columns]
  const int* starts;                                  // [rows]: first column of each row's window
  const int* ends;                                    // [rows]: end of the window
  const int* wanted;                                  // [rows]: the results of other rows stay; null: of none
  int* indices;                                       // [rows, topk], contiguous
  void* values;                                       // like logits, [rows, topk], contiguous
  int64_t logits_stride, starts_stride, ends_stride;  // in elements
  int rows, columns, topk;
  int device, num_sms;  // CUDA device index, and its SMs
  bool is_bf16;
  bool to_slots;  // the results are slots of a cache, by `table`
  PageTable table;
};

// Throws unless the kernels support `topk`. `op` is the qualified operator name.
void check_topk(const char* op, int64_t topk);

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);
// The same, for results that are ids, and for results that are slots of a cache.
const char* launch_ids(const Params& params, void* stream);
const char* launch_slots(const Params& params, void* stream);

}  // namespace dsa::topk_select
