// Selects the template instance and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::pack_kv_fp8 {

const char* launch(const Params& p, void* stream) {
  const int64_t ctas = (p.rows + kRows - 1) / kRows;
  if (ctas == 0) return nullptr;
  if (ctas > INT32_MAX) return "more than 2^31 CTAs";
  const sm90::Grid grid(unsigned(ctas), 1, /*programmatic=*/true);
  const auto s = static_cast<cudaStream_t>(stream);
  return p.d_qk == 576 ? sm90::launch_kernel<pack_kv_fp8_kernel<576>>(p.device, grid, kThreads, 0, s, p)
                       : sm90::launch_kernel<pack_kv_fp8_kernel<512>>(p.device, grid, kThreads, 0, s, p);
}

}  // namespace dsa::pack_kv_fp8
