// Atomic operations on 32-bit shared addresses.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

// atom.shared.or
__device__ __forceinline__ uint32_t atomic_or(uint32_t address, uint32_t bits) {
  uint32_t before;
  asm volatile("atom.shared::cta.or.b32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(bits) : "memory");
  return before;
}

}  // namespace dsa::sm90
