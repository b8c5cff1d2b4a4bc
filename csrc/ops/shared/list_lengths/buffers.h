// Finds the lengths of a call's lists.
#pragma once

#include <optional>

#include "ops/shared/list_lengths/params.h"
#include "torch/abi.h"

namespace dsa::list_lengths {

// If are_found, sets topk_length to the lengths of lists without the padding at their ends. They are in the tensor that
// it returns, which must live until the kernels are launched.
std::optional<Tensor> find(listed_keys::Problem& problem, const DeviceCall& call, int64_t fewest_slots = kFewestSlots);

}  // namespace dsa::list_lengths
