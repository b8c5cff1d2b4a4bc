// The instances for keys in the pages of a cache.
#include "instances.cuh"
#include "params.h"

namespace dsa::sparse_mla_fwd {

const char* launch_paged(const Params& params, const Pages& pages, float empty_lse, void* stream) {
  return launch_main<false>(PagedParams(params, pages, empty_lse), static_cast<cudaStream_t>(stream));
}

}  // namespace dsa::sparse_mla_fwd
