// What crosses from the host to the kernel. No torch, no CUDA headers.
#pragma once

#include <cstdint>

namespace dsa::topk_select {

struct Params {
  const void* logits;                                 // fp32 or bf16 [rows, columns]
  const int* starts;                                  // [rows]: first column of each row's window
  const int* ends;                                    // [rows]: the column behind it
  int* indices;                                       // [rows, topk], contiguous
  void* values;                                       // like logits, [rows, topk], contiguous
  int64_t logits_stride, starts_stride, ends_stride;  // in elements
  int rows, columns, topk;
  int ctas;             // of a row, from plan_ctas
  int device, num_sms;  // index of the one that runs the kernel, and its SMs
  bool is_bf16;
};

// Fails unless so many can be selected. `op` is the qualified name of the operator.
void check_topk(const char* op, int64_t topk);

// Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const Params& params, void* stream);

}  // namespace dsa::topk_select
