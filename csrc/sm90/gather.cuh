// Gathering kv rows into shared memory: which keys a query sees, and cp.async of their columns.
#pragma once

#include <cstdint>

#include "matrix_copy.cuh"

namespace dsa::sm90 {

// The one masking rule: ids below `end` are visible; negative ids are padding.
__device__ __forceinline__ bool is_visible(int id, int end) {
  return static_cast<unsigned>(id) < static_cast<unsigned>(end);
}

// Ids below the returned value are visible to query `s`: all keys, or those that are complete at its position.
__device__ __forceinline__ int visible_end(int seq_kv, bool causal, int64_t q_start, int64_t positions_per_key, int s) {
  if (!causal) return seq_kv;
  const int64_t end = (q_start + s + 1) / positions_per_key;
  return end < seq_kv ? static_cast<int>(end) : seq_kv;
}

// cp.async of 16 bytes past L1; writes zeros and reads nothing where `bytes` is 0
__device__ __forceinline__ void copy_16_bytes(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// 128 threads copy 64 rows; eight neighbouring threads copy 128 bytes of a row, and thread t serves rows t/8 + 16 i.
inline constexpr int kGatherRows = 64;
inline constexpr int kGatherThreadsPerRow = 8;
inline constexpr int kGatherRowStep = 16;
inline constexpr int kGatherRowsPerThread = kGatherRows / kGatherRowStep;
inline constexpr int kChunkBytes = kGatherRows * kSwizzleRowBytes;

// Copies chunks [kBegin, kEnd) (of 64 columns each) of this thread's rows. `shared` is the address of this thread's
// piece of its first row in chunk 0, `rows` that piece in row 0 in global memory.
template <int kBegin, int kEnd>
__device__ __forceinline__ void gather_chunks(uint32_t shared, const char* rows, int64_t row_bytes,
                                              const int (&ids)[kGatherRowsPerThread], int end) {
#pragma unroll
  for (int i = 0; i < kGatherRowsPerThread; ++i) {
    const bool visible = is_visible(ids[i], end);
    const char* row = rows + (visible ? ids[i] : 0) * row_bytes;
    const int bytes = visible ? 16 : 0;
#pragma unroll
    for (int chunk = kBegin; chunk < kEnd; ++chunk) {
      copy_16_bytes(shared + i * kGatherRowStep * kSwizzleRowBytes + chunk * kChunkBytes,
                    row + chunk * kSwizzleRowBytes, bytes);
    }
  }
}

}  // namespace dsa::sm90
