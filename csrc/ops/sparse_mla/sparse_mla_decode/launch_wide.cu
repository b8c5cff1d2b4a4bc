// Launches the kernel of many heads.
#include <algorithm>

#include "launches.h"
#include "sm90/launch.h"
#include "wide_kernel.cuh"

namespace dsa::sparse_mla_decode {
namespace {

template <int kColumns, bool kPaired>
const char* launch_instance(const KernelParams& p, cudaStream_t stream) {
  constexpr auto kKernel = sparse_mla_decode_wide_kernel<kColumns, kPaired>;
  constexpr int kBytes = sizeof(WideStorage<kColumns, kPaired>), kCtas = kPaired ? 2 : 1;
  static_assert(kBytes <= kMaxSharedBytes);
  int clusters = p.num_sms;
  if constexpr (kPaired) {
    const char* error = count_clusters<kKernel>(p.device, kCtas, kWideThreads, kBytes, &clusters);
    if (error != nullptr) return error;
  }
  clusters = std::min(clusters, p.items / kCtas);
  const Grid grid(unsigned(clusters * kCtas), kCtas, /*programmatic=*/true);
  return launch_kernel<kKernel>(p.device, grid, kWideThreads, kBytes, stream, p);
}

template <int kColumns>
const char* launch_columns(const KernelParams& p, cudaStream_t stream) {
  // Two blocks of heads: neighbors among the items, so that the CTAs of a cluster have those of the same keys.
  return p.heads > kWideHeads ? launch_instance<kColumns, true>(p, stream)
                              : launch_instance<kColumns, false>(p, stream);
}

}  // namespace

const char* launch_wide(const KernelParams& p, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_columns<576>(p, stream) : launch_columns<512>(p, stream);
}

}  // namespace dsa::sparse_mla_decode
