// Signals between CTAs in global memory. What the signaling thread has written, or what its CTA has written before a
// barrier, is visible to who has waited for the signal.
#pragma once

namespace dsa::sm90 {

// red.release.gpu.add of 1
__device__ __forceinline__ void count_done(int* g_counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(g_counter) : "memory");
}
// st.release.gpu
__device__ __forceinline__ void set_done(int* g_counter, int count) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(g_counter), "r"(count) : "memory");
}
// ld.acquire.gpu, until the counter is at least `count`
__device__ __forceinline__ void wait_done(const int* g_counter, int count) {
  for (;;) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_counter) : "memory");
    if (value >= count) return;
    __nanosleep(100);
  }
}

}  // namespace dsa::sm90
