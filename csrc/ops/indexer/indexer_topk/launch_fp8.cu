#include "lists.cuh"

namespace dsa::indexer_topk {

const char* launch_lists_fp8(const indexer_logits::Params& p, const Lists& lists, void* stream) {
  return launch_lists_of<cute::float_e4m3_t>(p, lists, stream);
}

}  // namespace dsa::indexer_topk
