#include "instances.cuh"

namespace dsa::indexer_logits {

const char* launch_bf16(const Params& p, void* stream) {
  return launch_element<cute::bfloat16_t, /*kAbove=*/false>(p, stream);
}

}  // namespace dsa::indexer_logits
