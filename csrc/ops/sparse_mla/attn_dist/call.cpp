#include "ops/sparse_mla/attn_dist/call.h"

#include <optional>

#include "ops/shared/list_lengths/buffers.h"
#include "ops/shared/merged_lists/buffers.h"
#include "ops/sparse_mla/attn_dist/params.h"

namespace dsa::attn_dist {

void compute(listed_keys::Params p, const DeviceCall& call) {
  const std::optional<Tensor> lengths = list_lengths::find(p, call);
  if (!p.normalize &&
      merged_lists::are_merged_forward(p.heads, p.groups, p.batch, p.seq_q, p.topk, p.seq_kv, p.num_sms)) {
    merged_lists::Lists lists{};
    const Tensor buffer = merged_lists::allocate(p, merged_lists::kMostForwardPercent, lists);
    call.check(launch_merging(p, lists, call.stream()));
  } else {
    call.check(launch(p, call.stream()));
  }
}

}  // namespace dsa::attn_dist
