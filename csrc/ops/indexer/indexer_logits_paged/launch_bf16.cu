#include "instances.cuh"

namespace dsa::indexer_logits_paged {

const char* launch_bf16(const Params& p, void* stream) { return launch_element<cute::bfloat16_t>(p, stream); }

}  // namespace dsa::indexer_logits_paged
