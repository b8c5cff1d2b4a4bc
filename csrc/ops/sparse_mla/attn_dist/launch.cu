// Selects the template instance.
#include "ops/shared/listed_keys/launch.cuh"
#include "ops/sparse_mla/attn_dist/params.h"

namespace dsa::attn_dist {
namespace {

template <int kKeyColumns>
const char* launch_columns(const listed_keys::Params& p, cudaStream_t stream) {
  using listed_keys::Attention;
  return p.heads / p.groups > 64 ? listed_keys::launch_config<kKeyColumns, 128, Attention>(p, stream)
                                 : listed_keys::launch_heads<kKeyColumns, Attention>(p, stream);
}

}  // namespace

const char* launch(const listed_keys::Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.d_qk == 576 ? launch_columns<576>(p, s) : launch_columns<512>(p, s);
}

}  // namespace dsa::attn_dist
