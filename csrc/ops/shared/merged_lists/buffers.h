// Allocates the buffers of merged lists.
#pragma once

#include "ops/shared/merged_lists/params.h"
#include "torch/abi.h"

namespace dsa::merged_lists {

// Allocates entries and items for as many runs at a time as have room. Sets the pointers and sizes in `lists`: `runs`
// to the runs per launch.
Tensor allocate(const listed_keys::Problem& problem, int percent, Lists& lists);

}  // namespace dsa::merged_lists
