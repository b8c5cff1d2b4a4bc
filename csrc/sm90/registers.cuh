// What ptxas has to be told about registers.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

// %tid.x, read again: registers are scarce where keys are held.
__device__ __forceinline__ int thread_index() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// The same object, at an address that the compiler does not know: what it derives from it, like the descriptors of
// wgmma, it computes where it is needed, instead of once for all tiles and in registers that are not there.
template <class T>
__device__ __forceinline__ T& recomputed(T& object) {
  T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}
// The same value.
__device__ __forceinline__ int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Gives a register that may be left without a value one that costs nothing. Else it is live from the start.
__device__ __forceinline__ void leave_undefined(unsigned& x) { asm volatile("" : "=r"(x)); }
__device__ __forceinline__ void leave_undefined(float& x) { asm volatile("" : "=f"(x)); }

// A use of the value, as far as ptxas knows.
__device__ __forceinline__ void use(uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred rarely;\n"
      "setp.eq.b32 rarely, %0, 0x5f3759df;\n"
      "@rarely nanosleep.u32 0;\n"
      "}\n" ::"r"(value));
}

}  // namespace dsa::sm90
