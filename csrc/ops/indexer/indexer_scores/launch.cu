// Selects the template instance.
#include "ops/indexer/indexer_scores/params.h"
#include "ops/shared/listed_keys/launch.cuh"

namespace dsa::indexer_scores {

const char* launch(const listed_keys::Params& p, void* stream) {
  using listed_keys::Indexer;
  const auto s = static_cast<cudaStream_t>(stream);
  return p.d_qk == 128 ? listed_keys::launch_heads<128, Indexer>(p, s) : listed_keys::launch_heads<64, Indexer>(p, s);
}

}  // namespace dsa::indexer_scores
