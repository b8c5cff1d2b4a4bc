// TMA copies of tiles of heads, through tensor maps of [batch, position, group, head, column] tensors of any strides.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace dsa::sm90 {

// Coordinates of a tile's first element, innermost first.
struct HeadTile {
  int column, head, group, position, batch;
};

// prefetch.tensormap
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk, global to shared: `bytes` and both addresses are multiples of 16
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The L2 policy that createpolicy.fractional.L2::evict_first makes: for data that is read once, which is then evicted
// before other data.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;

// The same with the L2 hint evict_first
__device__ __forceinline__ void bulk_load_once(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// cp.async.bulk, shared to global: `bytes` and both addresses are multiples of 16
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// cp.async.bulk.tensor.5d, global to shared; heads outside of the map arrive as zeros
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap* map, const HeadTile& at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.head), "r"(at.group), "r"(at.position),
      "r"(at.batch)
      : "memory");
}

// The same with the L2 hint evict_first
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap* map, const HeadTile& at,
                                              uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.head), "r"(at.group), "r"(at.position),
      "r"(at.batch), "l"(kEvictFirst)
      : "memory");
}

// cp.async.bulk.tensor.5d, shared to global; heads outside of the map are not written
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* shared, const HeadTile& at) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(at.column), "r"(at.head), "r"(at.group), "r"(at.position), "r"(at.batch)
               : "memory");
}

// cp.async.bulk.commit_group
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: waits until the shared memory of this thread's stores may be overwritten, except for
// the last kLater groups
template <int kLater = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
}

}  // namespace dsa::sm90
