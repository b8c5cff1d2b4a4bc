// Measures the lists of a call.
#pragma once

#include <optional>

#include "ops/shared/list_lengths/params.h"
#include "torch/abi.h"

namespace dsa::list_lengths {

// Where that pays, sets topk_length to the lengths of lists without the padding at their ends, in the tensor that it
// returns.
std::optional<Tensor> measure(listed_keys::Problem& problem, const DeviceCall& call,
                              int64_t fewest_slots = kFewestSlots);

}  // namespace dsa::list_lengths
