// Messages between CTAs in global memory: words without a barrier, as those in distributed shared memory (cluster.cuh).
// Before the kernel starts all bytes are 0xff, which makes each word kEmptyMessage.
#pragma once

#include "cluster.cuh"

namespace dsa::sm90 {

// st.relaxed.gpu
__device__ __forceinline__ void send_message(float* g, float word) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(g), "f"(word) : "memory");
}

// ld.relaxed.gpu: one message or four, or kEmptyMessage for each that has not arrived yet
__device__ __forceinline__ void read_messages(const float* g, float& word) {
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(word) : "l"(g) : "memory");
}
__device__ __forceinline__ void read_messages(const float* g, float4& words) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(words.x), "=f"(words.y), "=f"(words.z), "=f"(words.w)
               : "l"(g)
               : "memory");
}
__device__ __forceinline__ bool have_arrived(float word) { return has_arrived(word); }
__device__ __forceinline__ bool have_arrived(float4 words) {
  return has_arrived(words.x) && has_arrived(words.y) && has_arrived(words.z) && has_arrived(words.w);
}

// A number that may come from outside, so that it cannot be taken for an empty message.
__device__ __forceinline__ float message_of(float number) {
  return isnan(number) ? __uint_as_float(0x7fffffff) : number;
}

}  // namespace dsa::sm90
