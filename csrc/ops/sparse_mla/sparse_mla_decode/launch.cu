// Launches the main kernel and, if keys are split, the kernel that combines the parts.
#include "combine.cuh"
#include "launches.h"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::sparse_mla_decode {

const char* launch(const Params& params, void* stream) {
  const KernelParams p(params);
  const auto s = static_cast<cudaStream_t>(stream);
  const bool is_narrow = p.is_packed && p.plan.block_heads <= 32;
  const char* error = is_narrow ? launch_narrow(p, s) : p.is_packed ? launch_packed(p, s) : launch_bf16(p, s);
  if (error == nullptr && p.plan.splits > 1) {
    const Grid grid(unsigned(p.rows), 1, /*programmatic=*/true);
    error = launch_kernel<combine_kernel>(p.device, grid, kCombineThreads, 0, s, p);
  }
  return error;
}

}  // namespace dsa::sparse_mla_decode
