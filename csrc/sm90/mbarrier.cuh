// Shared-memory barriers (mbarrier) and the ring of slots that they guard.
#pragma once

#include <cstdint>

namespace dsa::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarrier.init
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// fence.mbarrier_init: makes the initialised barriers visible to the asynchronous proxy
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// A word of shared memory for a whole warp, read by lane 0. It is here when this returns: the load could otherwise
// still be under way when a later arrival of the same lane lets others overwrite the word.
__device__ __forceinline__ int read_for_warp(const int& word) {
  int value = 0;
  if (threadIdx.x % 32 == 0) value = word;
  return __shfl_sync(~0u, value, 0);
}

// mbarrier.expect_tx: the phase also waits for `bytes` that copies will report
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// mbarrier.arrive.expect_tx: both
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrives once all earlier cp.async of this thread have landed
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.try_wait.parity: returns when the phase of this parity has completed. A thread that has long to wait sleeps;
// without the hint it would wake, and take issue slots from others, every now and then.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  constexpr uint32_t kSleepNanoseconds = 10'000'000;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra finished;\n"
      "bra retry;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(kSleepNanoseconds)
      : "memory");
}

// A place in a ring of slots. Everyone who walks the ring starts at slot 0 with parity 0.
template <int kSlots>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  // By at most kSlots.
  __device__ __forceinline__ void advance(int slots = 1) {
    slot += slots;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
};

}  // namespace dsa::sm90
