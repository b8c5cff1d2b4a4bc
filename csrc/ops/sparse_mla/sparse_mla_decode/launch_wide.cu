// Launches the kernel of many heads.
#include <algorithm>

#include "launches.h"
#include "sm90/launch.h"
#include "wide_kernel.cuh"

namespace dsa::sparse_mla_decode {
namespace {

template <int kColumns>
const char* launch_instance(const KernelParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(WideStorage<kColumns>);
  static_assert(kBytes <= kMaxSharedBytes);
  const Grid grid(unsigned(std::min(p.items, p.num_sms)), 1, /*programmatic=*/true);
  return launch_kernel<sparse_mla_decode_wide_kernel<kColumns>>(p.device, grid, kThreads, kBytes, stream, p);
}

}  // namespace

const char* launch_wide(const KernelParams& p, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_instance<576>(p, stream) : launch_instance<512>(p, stream);
}

}  // namespace dsa::sparse_mla_decode
