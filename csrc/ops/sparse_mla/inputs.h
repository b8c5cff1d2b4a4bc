// The arguments that sparse_mla_fwd and sparse_mla_bwd share, and what must hold of them.
#pragma once

#include <cstdint>
#include <optional>

#include "torch/abi.h"

namespace dsa::sparse_mla {

struct Options {
  std::optional<double> sm_scale;
  int64_t d_v;
  bool causal;
  int64_t q_start, kv_stride;
  std::optional<Tensor> topk_length, attn_sink;
};

// Everything that needs no device, so that it is tested without one. `op` is the qualified name.
void check_inputs(const char* op, const Tensor& q, const Tensor& kv, const Tensor& indices, const Options& options);

// The device that q is on, which must be a Hopper GPU.
Device hopper_device(const char* op, const Tensor& q);

// The stride of dimension `dim` of q or kv, for tensor maps: they want multiples of 16 bytes, while views leave
// anything in a dimension of one element, whose stride is never used to step.
int64_t row_stride(const Tensor& tensor, int64_t dim);

// sm_scale, by default 1 / sqrt(d_qk).
float score_scale(const Options& options, int64_t d_qk);

}  // namespace dsa::sparse_mla
