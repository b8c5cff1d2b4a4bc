// Selects the template instance and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::gated_fusion {
namespace {

template <int kColumns, class Gate>
const char* launch_instance(const Forward& p, unsigned ctas, cudaStream_t stream) {
  return sm90::launch_kernel<gated_fusion_fwd_kernel<kColumns, Gate>>(p.in.device, ctas, kThreads, 0, stream, p);
}

template <int kColumns, class Gate>
const char* launch_instance(const Backward& p, unsigned ctas, cudaStream_t stream) {
  return sm90::launch_kernel<gated_fusion_bwd_kernel<kColumns, Gate>>(p.in.device, ctas, kThreads, 0, stream, p);
}

template <int kColumns, class Params>
const char* launch_columns(const Params& p, void* stream) {
  const unsigned ctas = (p.in.rows - 1) / Shape<kColumns>::kRows + 1;
  const auto s = static_cast<cudaStream_t>(stream);
  return p.in.gate_is_bf16 ? launch_instance<kColumns, __nv_bfloat16>(p, ctas, s)
                           : launch_instance<kColumns, float>(p, ctas, s);
}

template <class Params>
const char* launch_any(const Params& p, void* stream) {
  if (p.in.rows == 0) return nullptr;
  return p.in.columns == 64 ? launch_columns<64>(p, stream) : launch_columns<128>(p, stream);
}

}  // namespace

const char* launch(const Forward& p, void* stream) { return launch_any(p, stream); }
const char* launch(const Backward& p, void* stream) { return launch_any(p, stream); }

}  // namespace dsa::gated_fusion
