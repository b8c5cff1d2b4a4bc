// Selects the template instance and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::act_quant {
namespace {

template <class Input>
const char* launch_instance(const Params& p, void* stream) {
  const int64_t tiles_of_row = (p.columns - 1) / Shape<Input>::kColumns + 1,
                ctas = ((p.rows - 1) / kRows + 1) * tiles_of_row;
  if (ctas > INT32_MAX) return "more than 2^31 CTAs";
  return sm90::launch_kernel<act_quant_kernel<Input>>(p.device, sm90::Grid(unsigned(ctas), 1, /*programmatic=*/true),
                                                      kThreads, 0, static_cast<cudaStream_t>(stream), p,
                                                      cutlass::FastDivmod(static_cast<int>(tiles_of_row)));
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  if (p.rows == 0 || p.columns == 0) return nullptr;
  return p.is_bf16 ? launch_instance<__nv_bfloat16>(p, stream) : launch_instance<float>(p, stream);
}

}  // namespace dsa::act_quant
