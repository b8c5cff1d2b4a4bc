// Hints for ptxas on register allocation.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

// %tid.x, read again: cheaper than a live register where registers are scarce.
__device__ __forceinline__ int thread_index() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// The same object, at an address that hides its origin from the compiler. What the compiler derives from the address,
// such as wgmma descriptors, is then computed where it is needed, instead of once for all tiles in registers that are
// not available.
template <class T>
__device__ __forceinline__ T& recomputed(T& object) {
  T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}
// The same for a value.
__device__ __forceinline__ int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Marks a value as undefined, so that it occupies no register before its first assignment.
__device__ __forceinline__ void leave_undefined(unsigned& x) { asm volatile("" : "=r"(x)); }
__device__ __forceinline__ void leave_undefined(float& x) { asm volatile("" : "=f"(x)); }

// Counts as a use of the value for ptxas.
__device__ __forceinline__ void use(uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred rarely;\n"
      "setp.eq.b32 rarely, %0, 0x5f3759df;\n"
      "@rarely nanosleep.u32 0;\n"
      "}\n" ::"r"(value));
}

// Addresses, all computed here and kept in registers of their own.
template <class T>
__device__ __forceinline__ void hold(T*& a, T*& b, T*& c, T*& d) {
  asm volatile("" : "+l"(a), "+l"(b), "+l"(c), "+l"(d));
}

}  // namespace dsa::sm90
