// Clusters: who one is, and messages to the shared memory of other CTAs, of which their barriers are told.
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

// cp.async.bulk between CTAs: what `from` has goes to the place of `to` in CTA `rank`
__device__ __forceinline__ void bulk_send(const void* to, const void* from, int bytes, const uint64_t* barrier,
                                          int rank) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   remote_address(to, rank)),
               "r"(shared_address(from)), "r"(bytes), "r"(remote_address(barrier, rank))
               : "memory");
}

// st.async: numbers for the place of `to` in CTA `rank`. A barrier takes its time for each message, however short.
__device__ __forceinline__ void send(const float* to, const float (&values)[4], const uint64_t* barrier, int rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   remote_address(to, rank)),
               "r"(__float_as_uint(values[0])), "r"(__float_as_uint(values[1])), "r"(__float_as_uint(values[2])),
               "r"(__float_as_uint(values[3])), "r"(remote_address(barrier, rank))
               : "memory");
}
__device__ __forceinline__ void send(const float* to, const float (&values)[2], const uint64_t* barrier, int rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   remote_address(to, rank)),
               "r"(__float_as_uint(values[0])), "r"(__float_as_uint(values[1])), "r"(remote_address(barrier, rank))
               : "memory");
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
