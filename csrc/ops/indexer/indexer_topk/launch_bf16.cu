#include "lists.cuh"

namespace dsa::indexer_topk {

const char* launch_lists_bf16(const indexer_logits::Params& p, const Lists& lists, void* stream) {
  return launch_lists_of<cute::bfloat16_t>(p, lists, stream);
}

}  // namespace dsa::indexer_topk
