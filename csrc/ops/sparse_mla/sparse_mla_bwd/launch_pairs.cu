// Launches the kernels of pairs of CTAs.
#include <algorithm>

#include "launches.h"
#include "pairs_dq.cuh"
#include "sm90/launch.h"

namespace dsa::sparse_mla_bwd {
namespace {

template <int kQk>
const char* launch_columns(Params p, int64_t queries, cudaStream_t stream) {
  struct {
    CUtensorMap q, dout, dq;
  } maps;
  const char* error = encode_maps(maps, p, kBlockHeads, 1);
  for (int64_t first = 0; error == nullptr && first < queries; first += p.queries_at_once) {
    const int64_t items = std::min(p.queries_at_once, queries - first) * p.groups;
    const Plan plan = plan_items(items, p.topk, p.num_sms / 2);
    p.first_item = int(first * p.groups);
    p.whole_items = int(plan.whole);
    p.parts = plan.parts;
    const int64_t pairs = plan.whole + (items - plan.whole) * plan.parts;
    error = clear_finished(p, stream);
    if (error == nullptr) {
      error = launch_kernel<sparse_mla_bwd_pair_kernel<kQk>>(p.device, {unsigned(2 * pairs), 2}, kPairThreads,
                                                             sizeof(PairStorage<kQk>), stream, p, maps.q, maps.dout);
    }
    if (error == nullptr) {
      error =
          launch_kernel<dq_kernel<kQk>>(p.device, unsigned(2 * items), kDqThreads, sizeof(DqStorage<kQk>), stream, p);
    }
  }
  return error;
}

}  // namespace

const char* launch_pairs(Params p, int64_t queries, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_columns<576>(p, queries, stream) : launch_columns<512>(p, queries, stream);
}

}  // namespace dsa::sparse_mla_bwd
