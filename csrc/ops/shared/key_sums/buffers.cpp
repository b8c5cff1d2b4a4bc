#include "ops/shared/key_sums/buffers.h"

namespace dsa::key_sums {

std::vector<Tensor> allocate(Params& p, std::initializer_list<int64_t> result_sizes, bool adds_up, int64_t slots,
                             int64_t rows) {
  Tensor result = empty(result_sizes, ScalarType::BFloat16, p.device);
  Tensor sums = empty({adds_up ? p.keys : 0, p.columns}, ScalarType::Float, p.device);
  p.result = result.data_ptr();
  p.sums = static_cast<float*>(sums.data_ptr());
  std::vector<Tensor> buffers{result, sums};
  if (slots == 0) return buffers;
  p.sort_bytes = sort_bytes(slots, p.keys);
  buffers.push_back(empty({rows, p.columns}, ScalarType::BFloat16, p.device));
  p.rows = buffers.back().data_ptr();
  buffers.push_back(empty({p.sort_bytes}, ScalarType::Byte, p.device));
  p.sort_space = buffers.back().data_ptr();
  buffers.push_back(empty({4 * slots + p.keys + 1}, ScalarType::Int, p.device));
  auto* next = static_cast<unsigned*>(buffers.back().data_ptr());
  for (unsigned** array : {p.slot_keys, p.slot_keys + 1, p.slot_rows, p.slot_rows + 1}) {
    *array = next;
    next += slots;
  }
  p.key_starts = next;
  buffers.push_back(empty({max_parts(slots), p.columns}, ScalarType::Float, p.device));
  p.part_sums = static_cast<float*>(buffers.back().data_ptr());
  buffers.push_back(empty({max_parts(slots), p.columns / 8}, ScalarType::Int, p.device));
  p.parts_done = static_cast<unsigned*>(buffers.back().data_ptr());
  return buffers;
}

}  // namespace dsa::key_sums
