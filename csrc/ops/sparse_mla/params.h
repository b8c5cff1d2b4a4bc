// What the kernels of sparse MLA have in common of what crosses from the host to them. No torch, no CUDA headers.
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
