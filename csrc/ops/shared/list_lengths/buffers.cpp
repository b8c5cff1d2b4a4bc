#include "ops/shared/list_lengths/buffers.h"

namespace dsa::list_lengths {

std::optional<Tensor> find(listed_keys::Problem& p, const DeviceCall& call, int64_t fewest_slots) {
  if (!are_found(p, fewest_slots)) return std::nullopt;
  Tensor lengths = empty({p.batch, p.seq_q}, ScalarType::Int, call.index);
  auto* const first = static_cast<int*>(lengths.data_ptr());
  call.check(launch(p, first, call.stream()));
  p.topk_length = first;
  p.topk_length_stride_b = p.seq_q;
  p.topk_length_stride_s = 1;
  return lengths;
}

}  // namespace dsa::list_lengths
