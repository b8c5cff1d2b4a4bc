#include "ops/mhc/inputs.h"

#include <cstdint>
#include <optional>

#include "ops/mhc/limits.h"
#include "torch/abi.h"

namespace dsa::mhc {

void check_streams(const char* op, const Tensor& x) {
  check_tensor(op, "x", x, ScalarType::BFloat16, {{"B"}, {"S"}, {"n"}, {"D"}});
  const int64_t streams = x.size(2), columns = x.size(3);
  DSA_CHECK(streams == 2 || streams == 4, op, ": x must have 2 or 4 streams, got ", streams);
  DSA_CHECK(columns > 0 && columns % 128 == 0 && columns <= kMaxColumns, op,
            ": x's hidden size must be a multiple of 128, at most ", kMaxColumns, ", got ", columns);
  DSA_CHECK(x.size(0) * x.size(1) <= INT32_MAX, op, ": x must have fewer than 2^31 tokens, got ", describe(x));
}

void check_parameters(const char* op, const Tensor& x, const Tensor& phi, const Tensor& alpha,
                      const std::optional<Tensor>& gamma, double eps) {
  const int64_t streams = x.size(2), flat = streams * x.size(3), mixed = streams * streams + 2 * streams;
  check_tensor(op, "phi", phi, ScalarType::Float, {{"M", mixed}, {"C", flat}});
  check_tensor(op, "alpha", alpha, ScalarType::Float, {{"A", 3}});
  if (gamma) check_tensor(op, "gamma", *gamma, ScalarType::Float, {{"C", flat}});
  DSA_CHECK(eps >= 0 && eps < 1, op, ": eps must be from 0 to less than 1, got ", eps);
  check_same_device(op, "phi", phi, "x", x);
  check_same_device(op, "alpha", alpha, "x", x);
  if (gamma) check_same_device(op, "gamma", *gamma, "x", x);
}

}  // namespace dsa::mhc
