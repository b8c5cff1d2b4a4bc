// Clusters: who one is, and words to and from the shared memory of other CTAs.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace dsa::sm90 {

// %clusterid.x; without clusters a CTA is its own
__device__ __forceinline__ int cluster_index() {
  int r;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(r));
  return r;
}

// %cluster_ctarank
__device__ __forceinline__ int cluster_rank() {
  int r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// mapa: the address of the same place in another CTA's shared memory
__device__ __forceinline__ uint32_t remote_address(const void* place, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  return address;
}

// Messages without barriers, which would take longer than the message: a word that has come differs from kNothing, a
// NaN that no arithmetic makes, and its reader puts kNothing back before the sender can know that it has been read.
inline constexpr uint32_t kNothing = 0xffffffff;

__device__ __forceinline__ bool has_come(float word) { return __float_as_uint(word) != kNothing; }

// What has come so far.
__device__ __forceinline__ float read_message(const float* place) { return *static_cast<const volatile float*>(place); }

__device__ __forceinline__ void clear_message(float* place) {
  *static_cast<volatile float*>(place) = __uint_as_float(kNothing);
}

// To `address`, which is in another CTA.
__device__ __forceinline__ void send_message(uint32_t address, float word) {
  asm volatile("st.relaxed.cluster.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(word) : "memory");
}

// What CTA `rank` has at the place of `from`.
__device__ __forceinline__ float4 read_remote(const float* from, int rank) {
  float4 r;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(remote_address(from, rank))
               : "memory");
  return r;
}

}  // namespace dsa::sm90
