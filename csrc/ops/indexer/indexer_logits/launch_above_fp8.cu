#include "instances.cuh"

namespace dsa::indexer_logits {

const char* launch_above_fp8(const Params& p, void* stream) {
  return launch_element<cute::float_e4m3_t, /*kAbove=*/true>(p, stream);
}

}  // namespace dsa::indexer_logits
