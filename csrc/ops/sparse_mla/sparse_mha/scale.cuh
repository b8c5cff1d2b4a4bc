// The scale of scores.
#pragma once

#include <cfloat>

#include "sm90/math.cuh"

namespace dsa::sparse_mha {

// |sm_scale| log2(e), within what keeps -inf times it -inf.
__device__ __forceinline__ float positive_scale_log2(float sm_scale) {
  return fminf(fmaxf(fabsf(sm_scale) * sm90::kLog2E, FLT_MIN), FLT_MAX);
}

}  // namespace dsa::sparse_mha
