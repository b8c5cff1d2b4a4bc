// Memory for key_sums.
#pragma once

#include <vector>

#include "ops/shared/key_sums/params.h"
#include "torch/abi.h"

namespace dsa::key_sums {

// Allocates what a call needs, and says in `params` where it is: the result, which is returned first; sums if
// `adds_up`; and for `slots` slots a launch, if there are any, `rows` rows and what sorts them. `keys`, `columns` and
// `device` are given.
std::vector<Tensor> allocate(Params& params, std::initializer_list<int64_t> result_sizes, bool adds_up, int64_t slots,
                             int64_t rows);

}  // namespace dsa::key_sums
