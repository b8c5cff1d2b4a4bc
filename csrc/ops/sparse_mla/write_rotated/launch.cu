// Launches the kernel.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::write_rotated {

const char* launch(const Params& params, void* stream) {
  const KernelParams p(params);
  const int64_t threads = p.rows * p.pieces;
  if (threads == 0) return nullptr;
  if (threads > INT32_MAX) return "more than 2^31 pieces";
  const unsigned ctas = unsigned((threads + kThreads - 1) / kThreads);
  return sm90::launch_kernel<write_rotated_kernel>(p.device, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), p);
}

}  // namespace dsa::write_rotated
