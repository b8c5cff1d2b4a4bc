// The instances for keys in the pages of a cache.
#include "instances.cuh"
#include "params.h"

namespace dsa::sparse_mla_fwd {

const char* launch_paged(const Params& params, const Pages& pages, float empty_lse, void* stream) {
  const KernelPages kernel_pages{pages.page_bytes, pages.slot_bytes, cutlass::FastDivmod(pages.page)};
  const KernelParams p(params, {nullptr, nullptr, empty_lse}, kernel_pages);
  return launch_main<false, true>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace dsa::sparse_mla_fwd
