// Host-to-device parameters that all kernels of sparse MLA share. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "ops/shared/listed_keys/params.h"

namespace dsa::sparse_mla {

struct Problem : listed_keys::Problem {
  const float* attn_sink;  // [heads] or null
  int64_t attn_sink_stride;
  int d_v;  // leading columns of kv that are values
};

}  // namespace dsa::sparse_mla
