// Division by a constant of the host, for host and device: tested without a GPU.
#pragma once

#include <cstdint>

namespace dsa::sparse_mla_decode {

// Of numbers from 0 to 2^31 - 1, without the branch that cutlass::FastDivmod has for a divisor of 1.
struct Divisor {
  explicit Divisor(int divisor) : divisor(divisor) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    // 2^(31 + shift) / divisor, rounded up: from 2^31 to 2^32 - 1. The error of a quotient stays below 1 / divisor.
    multiplier = static_cast<uint32_t>(((int64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const { return __umulhi(x << 1, multiplier) >> shift; }
#else
  uint32_t quotient(uint32_t x) const { return static_cast<uint32_t>(uint64_t{x << 1} * multiplier >> 32) >> shift; }
#endif

  uint32_t multiplier;
  int divisor, shift = 0;
};

}  // namespace dsa::sparse_mla_decode
