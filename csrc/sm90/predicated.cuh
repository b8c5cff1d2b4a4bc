// Stores under a predicate, where a branch would cost more: ptxas decides for branches on its own.
#pragma once

namespace dsa::sm90 {

// st.global, if `condition` holds
__device__ __forceinline__ void store_if(bool condition, float* g, float value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "@p st.global.f32 [%1], %2;\n"
      "}\n" ::"r"(static_cast<int>(condition)),
      "l"(g), "f"(value)
      : "memory");
}

}  // namespace dsa::sm90
