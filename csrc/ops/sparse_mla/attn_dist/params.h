// The launch function of attn_dist. No torch, no CUDA headers.
#pragma once

#include "ops/shared/listed_keys/params.h"

namespace dsa::attn_dist {

// `head_factors` is lse. Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const listed_keys::Params& params, void* stream);

}  // namespace dsa::attn_dist
