// Allocates the buffers of key_sums.
#pragma once

#include <vector>

#include "ops/shared/key_sums/params.h"
#include "torch/abi.h"

namespace dsa::key_sums {

// Allocates the buffers of a call, sets their pointers in `params` and returns them, the result first. Allocates sums
// if `adds_up`; if `slots`, the slots per launch, is not 0, also `rows` rows and the sort's buffers. The caller sets
// `keys`, `columns` and `device` before.
std::vector<Tensor> allocate(Params& params, std::initializer_list<int64_t> result_sizes, bool adds_up, int64_t slots,
                             int64_t rows);

}  // namespace dsa::key_sums
