// The launch functions of attn_dist. No torch, no CUDA headers.
#pragma once

#include "ops/shared/listed_keys/params.h"
#include "ops/shared/merged_lists/params.h"

namespace dsa::attn_dist {

// `head_factors` is lse. Launches on `stream` (a cudaStream_t). Returns null, or a text that says what failed.
const char* launch(const listed_keys::Params& params, void* stream);

// The same for queries whose lists are merged in runs, where that pays: are_merged_forward, and no normalization.
const char* launch_merging(const listed_keys::Params& params, const merged_lists::Lists& lists, void* stream);

}  // namespace dsa::attn_dist
