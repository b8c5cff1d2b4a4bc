// Chooses the instances and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::mhc_post {
namespace {

unsigned ctas_of(const Params& p) { return (p.tokens - 1) / kTokens + 1; }

}  // namespace

const char* launch_fwd(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_kernel<mhc_post_fwd_kernel<2>>(p.device, ctas_of(p), kThreads, 0, s, p)
                        : launch_kernel<mhc_post_fwd_kernel<4>>(p.device, ctas_of(p), kThreads, 0, s, p);
}

const char* launch_bwd(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_kernel<mhc_post_bwd_kernel<2>>(p.device, ctas_of(p), kThreads, 0, s, p)
                        : launch_kernel<mhc_post_bwd_kernel<4>>(p.device, ctas_of(p), kThreads, 0, s, p);
}

}  // namespace dsa::mhc_post
