#include "instances.cuh"

namespace dsa::indexer_logits_paged {

const char* launch_fp8(const Params& p, void* stream) { return launch_element<cute::float_e4m3_t>(p, stream); }

}  // namespace dsa::indexer_logits_paged
