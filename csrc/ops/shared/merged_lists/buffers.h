// Allocates the buffers of merged lists.
#pragma once

#include "ops/shared/merged_lists/params.h"
#include "torch/abi.h"

namespace dsa::merged_lists {

// Allocates entries and items for as many runs at a time as have room, and the bits of keys. Sets the pointers in
// `lists` and `operands`, and the sizes in `lists`: `runs` to the runs per launch.
Tensor allocate(const listed_keys::Problem& problem, Lists& lists, Operands& operands);

}  // namespace dsa::merged_lists
