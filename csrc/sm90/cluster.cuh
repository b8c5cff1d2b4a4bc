// Thread block clusters: a CTA's position in its cluster, and reads and writes in other CTAs' shared memory (DSMEM).
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace dsa::sm90 {

// %clusterid.x; without clusters, the index of the CTA
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

// barrier.cluster.arrive that orders no memory accesses: all threads say that they run, and then call cluster_wait.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;"); }

// barrier.cluster.wait
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// mapa: the address, in another CTA's shared memory, of the same variable
__device__ __forceinline__ uint32_t remote_address(const void* place, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  return address;
}

// mbarrier.arrive on another CTA's barrier. With .release.cluster it would wait for all accesses that are under way.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// cp.async.bulk, shared to distributed shared memory: `address` and `barrier`, to which the bytes are reported, are in
// the same other CTA. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_send(uint32_t address, const void* shared, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
      "r"(shared_address(shared)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Messages without a barrier, which would take longer than the message itself: an empty word holds kEmptyMessage, a NaN
// that no arithmetic produces. The reader writes kEmptyMessage back before the sender can know that the word has been
// read.
inline constexpr uint32_t kEmptyMessage = 0xffffffff;

__device__ __forceinline__ bool has_arrived(float word) { return __float_as_uint(word) != kEmptyMessage; }

// The message, or kEmptyMessage when it has not arrived yet.
__device__ __forceinline__ float read_message(const float* place) { return *static_cast<const volatile float*>(place); }

__device__ __forceinline__ void clear_message(float* place) {
  *static_cast<volatile float*>(place) = __uint_as_float(kEmptyMessage);
}

// st to distributed shared memory: `address` is in another CTA.
__device__ __forceinline__ void send_message(uint32_t address, float word) {
  asm volatile("st.relaxed.cluster.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(word) : "memory");
}

// ld from distributed shared memory: the four floats at `from` in CTA `rank`.
__device__ __forceinline__ float4 read_remote(const float* from, int rank) {
  float4 r;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(remote_address(from, rank))
               : "memory");
  return r;
}

}  // namespace dsa::sm90
