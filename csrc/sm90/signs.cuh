// Signs of bytes.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

// prmt: four bytes, each of them copies of the sign bit of a byte of (low, high) that a nibble of kBytes - 8 selects.
template <uint32_t kBytes>
__device__ __forceinline__ uint32_t spread_signs(uint32_t low, uint32_t high) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "n"(kBytes));
  return r;
}

}  // namespace dsa::sm90
