// Launches the kernels around the scoring of candidates.
#include <algorithm>

#include "select.cuh"
#include "sm90/launch.h"

namespace dsa::indexer_topk {

const char* launch_bounds(const Params& p, void* stream) {
  constexpr int kThreads = 256;
  const unsigned ctas = (std::max(p.queries, p.sampled) + kThreads - 1) / kThreads;
  return sm90::launch_kernel<sample_bounds_kernel>(p.device, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), p);
}

const char* launch_bars(const Params& p, void* stream) {
  return sm90::launch_kernel<sample_bars_kernel>(p.device, unsigned(p.queries), BarShape::kThreads, 0,
                                                 static_cast<cudaStream_t>(stream), p);
}

const char* launch_lists(const indexer_logits::Params& scores, const Lists& lists, void* stream) {
  return scores.is_bf16 ? launch_lists_bf16(scores, lists, stream) : launch_lists_fp8(scores, lists, stream);
}

const char* launch_select(const Params& p, void* stream) {
  return sm90::launch_kernel<select_listed_kernel>(p.device, unsigned(p.queries), SelectShape::kThreads,
                                                   sizeof(SelectStorage), static_cast<cudaStream_t>(stream), p);
}

}  // namespace dsa::indexer_topk
