// Selects the template instance and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::block_select {
namespace {

// With as many warps per row as its blocks need, a power of two from kWarps on.
template <class T, int kWarps = 1>
const char* launch_rows_of(const Params& p, cudaStream_t stream) {
  if constexpr (kWarps * kWarpItems < kMaxBlocks) {
    if (p.blocks > kWarps * kWarpItems) return launch_rows_of<T, 2 * kWarps>(p, stream);
  }
  using Cta = Shape<kWarps>;
  const unsigned ctas = (unsigned(p.rows) + Cta::kRows - 1) / Cta::kRows;
  return sm90::launch_kernel<block_select_kernel<T, kWarps>>(p.device, ctas, Cta::kThreads, Cta::kSharedBytes, stream,
                                                             p);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  if (p.rows == 0) return nullptr;
  const auto s = static_cast<cudaStream_t>(stream);
  return p.is_bf16 ? launch_rows_of<__nv_bfloat16>(p, s) : launch_rows_of<float>(p, s);
}

}  // namespace dsa::block_select
