// Shared-memory barriers (mbarrier), and the ring buffer whose stages they guard.
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

// fence.mbarrier_init: makes the initialized barriers visible to the async proxy
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Reads a word of shared memory in lane 0 and broadcasts it to the warp. The shuffle completes the load before this
// returns: otherwise it could still be in flight when a later arrival of the lane lets others overwrite the word.
__device__ __forceinline__ int read_for_warp(const int& word) {
  int value = 0;
  if (threadIdx.x % 32 == 0) value = word;
  return __shfl_sync(~0u, value, 0);
}

// mbarrier.expect_tx: the phase also waits for `bytes` that copies report
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// mbarrier.arrive.expect_tx: arrive and expect_bytes in one
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrives when all earlier cp.async of this thread are complete
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.try_wait.parity: returns when the phase with this parity is complete. The time hint lets a thread that waits
// long sleep; without it the thread would wake now and then and take issue slots from others.
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

// mbarrier.test_wait.parity: whether the phase with this parity is complete
__device__ __forceinline__ bool test_wait(uint64_t* barrier, uint32_t parity) {
  int done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.s32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// A position in a ring buffer: stage and phase bit. Every walker of the ring starts at slot 0 with parity 0.
template <int kSlots>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  // `slots` is at most kSlots.
  __device__ __forceinline__ void advance(int slots = 1) {
    slot += slots;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
};

}  // namespace dsa::sm90
