#include "instances.cuh"

namespace dsa::sparse_mla_decode {

const char* launch_bf16(const KernelParams& p, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_columns<576, false>(p, stream) : launch_columns<512, false>(p, stream);
}

}  // namespace dsa::sparse_mla_decode
