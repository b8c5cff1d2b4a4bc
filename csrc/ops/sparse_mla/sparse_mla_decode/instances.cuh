// Selects the template instance for a number of heads and launches it.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "launches.h"
#include "sm90/launch.h"

namespace dsa::sparse_mla_decode {

template <int kColumns, int kHeads, bool kPacked>
const char* launch_instance(const KernelParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedStorage<Config{kColumns, kHeads, kPacked}>);
  static_assert(kBytes <= kMaxSharedBytes);
  const Grid grid(unsigned(std::min(p.items, p.num_sms)), 1, /*programmatic=*/true);
  return launch_kernel<sparse_mla_decode_kernel<kColumns, kHeads, kPacked>>(p.device, grid, kThreads, kBytes, stream,
                                                                            p);
}

template <int kColumns, bool kPacked>
const char* launch_columns(const KernelParams& p, cudaStream_t stream) {
  switch (p.plan.block_heads) {
    case 16:
      return launch_instance<kColumns, 16, kPacked>(p, stream);
    case 32:
      return launch_instance<kColumns, 32, kPacked>(p, stream);
    default:
      return launch_instance<kColumns, 64, kPacked>(p, stream);
  }
}

}  // namespace dsa::sparse_mla_decode
