// What attn_dist does with checked inputs.
#pragma once

#include "ops/shared/listed_keys/params.h"
#include "torch/abi.h"

namespace dsa::attn_dist {

// `head_factors` is lse. Finds lengths of lists, and merges lists, where that pays.
void compute(listed_keys::Params params, const DeviceCall& call);

}  // namespace dsa::attn_dist
