#include "instances.cuh"

namespace dsa::sparse_mla_decode {

const char* launch_packed(const KernelParams& p, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_instance<576, 64, true>(p, stream) : launch_instance<512, 64, true>(p, stream);
}

}  // namespace dsa::sparse_mla_decode
