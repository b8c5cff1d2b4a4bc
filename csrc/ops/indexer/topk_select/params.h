// Host-to-device parameters. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::topk_select {

struct Params {
  const void* logits;                                 // fp32 or bf16 [rows, columns]
  const int* starts;                                  // [rows]: first column of each row's window
  const int* ends;                                    // [rows]: end of the window
  int* indices;                                       // [rows, topk], contiguous
  void* values;                                       // like logits, [rows, topk], contiguous
  int64_t logits_stride, starts_stride, ends_stride;  // in elements
  int rows, columns, topk;
  int ctas;             // per row, from plan_ctas
  int device, num_sms;  // CUDA device index, and its SMs
  bool is_bf16;
  bool skips_empty;   // write nothing for rows with an empty window
  bool programmatic;  // the preceding kernel of the stream writes the logits, and launches this one early
};

// Throws unless the kernels support `topk`. `op` is the qualified operator name.
void check_topk(const char* op, int64_t topk);

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::topk_select
