// The arguments that the operators of sparse multi-head attention share, their checks, and their masks.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/sparse_mla/sparse_mha/mask.h"
#include "torch/abi.h"

namespace dsa::sparse_mha {

struct Inputs {
  Tensor q, k, k_rope, indices;
  std::optional<Tensor> v;  // only of operators that read values
  std::optional<double> sm_scale;
  bool causal;
  int64_t q_start;
  std::optional<Tensor> starts, ends;
  std::optional<int64_t> window;

  bool empty() const { return q.numel() == 0 || k.numel() == 0; }
};

// All checks that need no device, so that they are tested without one. `op` is the qualified operator name.
void check_inputs(const char* op, const Inputs& inputs);

// [batch, positions, heads, columns], or without heads.
Heads heads_of(const Tensor& tensor);

// The bits of a mask that an operator reads besides those of tiles: of each query's keys, or of each key's queries.
enum class Bits { kNone, kKeys, kQueries };

// The kernel parameters that follow from the arguments, and the memory of the mask, which is made on the current
// stream.
class MaskedProblem {
 public:
  MaskedProblem(const Inputs& inputs, const DeviceCall& call, Bits bits);

  Problem problem;
  Lists lists;

 private:
  Tensor keys_, queries_, tiles_;
};

}  // namespace dsa::sparse_mha
