// Turns: two groups of threads alternate, by a named barrier each.
#pragma once

namespace dsa::sm90 {

// bar.arrive on a named barrier on which others wait (bar.sync); `threads` counts both
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace dsa::sm90
