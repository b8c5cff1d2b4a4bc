// Moves 8x8 bf16 matrices between registers and shared memory, in the 128-byte swizzle that wgmma and TMA read, and
// between the lanes of a warp.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace dsa::sm90 {

inline constexpr int kSwizzleRowBytes = 128;  // 64 bf16 columns

// Byte offset, in a chunk of rows of 64 bf16 columns, of the 16-byte piece `piece` (0..7) of row `row`.
__device__ __host__ __forceinline__ constexpr int swizzled_offset(int row, int piece) {
  return row * kSwizzleRowBytes + ((piece ^ (row & 7)) << 4);
}

// 16 bytes of a row, the unit of the swizzle: 8 bf16 columns.
inline constexpr int kPieceColumns = 8;
struct alignas(16) Piece {
  uint32_t words[4];
};

// ldmatrix.x4
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ldmatrix.x4.trans: values of one column become values of one row of the thread's fragment
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// stmatrix.x4
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// stmatrix.x4.trans: values of one row of the thread's fragment become values of one column
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// stmatrix.x2.trans: the same for two matrices; lanes 16 to 31 repeat the addresses of the others
__device__ __forceinline__ void store_two_matrices_transposed(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// movmatrix.trans: the transpose of an 8x8 matrix, of which each lane holds two neighboring elements of a row
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// cvt.rn.bf16x2: `low` goes to the lower half
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The inverse of pack_bf16: the lower half comes first.
__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// The dot product of two bf16 pairs, in fp32.
__device__ __forceinline__ float dot_bf16(uint32_t a, uint32_t b) {
  return fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16),
              __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
}

}  // namespace dsa::sm90
