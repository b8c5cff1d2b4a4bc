// Launches the main kernel and, if keys are split, the kernel that combines the parts.
#include "combine.cuh"
#include "instances.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::sparse_mla_fwd {
namespace {

template <bool kMax>
const char* launch_kernels(const KernelParams& p, cudaStream_t stream) {
  const char* error = launch_main<kMax>(p, stream);
  if (error == nullptr && p.splits > 1) {
    error = launch_kernel<combine_kernel<kMax>>(p.device, unsigned(p.rows), kCombineThreads, 0, stream, p);
  }
  return error;
}

}  // namespace

const char* launch(const Params& params, const Maxima& maxima, void* stream) {
  const KernelParams p(params, maxima);
  const auto s = static_cast<cudaStream_t>(stream);
  return p.maxima.max_logits != nullptr ? launch_kernels<true>(p, s) : launch_kernels<false>(p, s);
}

}  // namespace dsa::sparse_mla_fwd
