// Launches the kernels of pairs of CTAs.
#include <algorithm>
#include <type_traits>

#include "launches.h"
#include "pairs_dq.cuh"
#include "sm90/launch.h"

namespace dsa::sparse_mla_bwd {
namespace {

template <int kQk>
const char* launch_columns(Params& p, int64_t queries, cudaStream_t stream) {
  struct {
    CUtensorMap q, dout, dq;
  } maps;
  static_assert(sizeof(PairStorage<kQk>) <= kMaxSharedBytes);
  const char* error = encode_maps(maps, p, kBlockHeads, 1);
  if (error != nullptr) return error;
  const int64_t items = queries * p.groups;
  const Plan plan = plan_items(items, p.topk, p.num_sms / 2);
  p.whole_items = int(plan.whole);
  p.parts = plan.parts;
  const int64_t pairs = plan.whole + (items - plan.whole) * plan.parts;
  const auto launch = [&](auto deterministic, auto with_dist) {
    return launch_kernel<sparse_mla_bwd_pair_kernel<kQk, deterministic, with_dist>>(
        p.device, {unsigned(2 * pairs), 2}, kPairThreads, sizeof(PairStorage<kQk>), stream, p, maps.q, maps.dout);
  };
  const auto launch_dist = [&](auto deterministic) {
    return p.dist == nullptr ? launch(deterministic, std::false_type{}) : launch(deterministic, std::true_type{});
  };
  error = p.deterministic ? launch_dist(std::true_type{}) : launch_dist(std::false_type{});
  if (error != nullptr) return error;
  const int halves = static_cast<int>(2 * items);
  return launch_kernel<dq_kernel<kQk>>(p.device, unsigned(std::min(halves, p.num_sms)), kDqThreads,
                                       sizeof(DqStorage<kQk>), stream, p, halves);
}

}  // namespace

const char* launch_pairs(Params p, int64_t queries, cudaStream_t stream) {
  return p.d_qk == 576 ? launch_columns<576>(p, queries, stream) : launch_columns<512>(p, queries, stream);
}

}  // namespace dsa::sparse_mla_bwd
