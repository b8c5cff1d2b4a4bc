// Launches the kernel of few heads.
#include <algorithm>

#include "launches.h"
#include "narrow.cuh"
#include "sm90/launch.h"

namespace dsa::sparse_mla_decode {
namespace {

template <int kColumns, int kHeads>
const char* launch_instance(const KernelParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(NarrowStorage<kColumns, kHeads>);
  static_assert(kBytes <= kMaxSharedBytes);
  const Grid grid(unsigned(std::min(p.items, p.num_sms)), 1, /*programmatic=*/true);
  return launch_kernel<sparse_mla_decode_narrow_kernel<kColumns, kHeads>>(p.device, grid, kNarrowThreads, kBytes,
                                                                          stream, p);
}

}  // namespace

const char* launch_narrow(const KernelParams& p, cudaStream_t stream) {
  if (p.plan.block_heads == 16) {
    return p.d_qk == 576 ? launch_instance<576, 16>(p, stream) : launch_instance<512, 16>(p, stream);
  }
  return p.d_qk == 576 ? launch_instance<576, 32>(p, stream) : launch_instance<512, 32>(p, stream);
}

}  // namespace dsa::sparse_mla_decode
