// Asynchronous copies of pairs of words.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace dsa::sm90 {

// cp.async of 8 bytes
__device__ __forceinline__ void copy_8_bytes(void* shared, const void* g) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(g) : "memory");
}

}  // namespace dsa::sm90
