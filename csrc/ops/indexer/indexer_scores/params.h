// The launch function of indexer_scores. No torch, no CUDA headers.
#pragma once

#include "ops/shared/listed_keys/params.h"

namespace dsa::indexer_scores {

// `head_factors` are the weights. Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const listed_keys::Params& params, void* stream);

}  // namespace dsa::indexer_scores
