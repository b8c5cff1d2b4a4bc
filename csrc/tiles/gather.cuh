// Gathers the kv rows of listed keys into shared memory, by cp.async.
#pragma once

#include <cstdint>

#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/registers.cuh"
#include "visibility.cuh"

namespace dsa::tiles {

using namespace dsa::sm90;

// 128 threads copy 64 rows: eight consecutive threads copy 128 bytes of a row, and thread t copies rows t/8 + 16 i.
inline constexpr int kGatherRows = 64;
inline constexpr int kGatherThreadsPerRow = 8;
inline constexpr int kGatherRowStep = 16;
inline constexpr int kGatherRowsPerThread = kGatherRows / kGatherRowStep;
inline constexpr int kChunkBytes = kGatherRows * kSwizzleRowBytes;

// A thread's first row of a tile, and its 16-byte piece of every 128 bytes.
__device__ __forceinline__ int gather_row(int thread) { return thread / kGatherThreadsPerRow; }
__device__ __forceinline__ int gather_piece(int thread) { return thread % kGatherThreadsPerRow; }

// One thread's rows of a tile.
struct GatherRows {
  const char* g_rows[kGatherRowsPerThread];
  unsigned visible = 0;  // bit i: the i-th row is a visible key; other rows are filled with zeros

  // `address_of` returns the address of this thread's 16-byte piece of the row of an id.
  template <class AddressOf>
  __device__ __forceinline__ GatherRows(const AddressOf& address_of, const int (&ids)[kGatherRowsPerThread],
                                        VisibleIds visible_ids) {
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      const bool is_key = visible_ids.has(ids[i]);
      visible |= is_key << i;
      g_rows[i] = address_of(is_key ? ids[i] : 0);
    }
    // All addresses before the first copy: with one address register, each row would wait until the copies of the row
    // before are issued.
    hold(g_rows[0], g_rows[1], g_rows[2], g_rows[3]);
  }

  // Rows that are `row_bytes` apart; `g_first` points to this thread's piece of row 0.
  __device__ __forceinline__ GatherRows(const char* g_first, uint32_t row_bytes, const int (&ids)[kGatherRowsPerThread],
                                        VisibleIds visible_ids)
      : GatherRows([=](unsigned id) { return g_first + uint64_t{id} * row_bytes; }, ids, visible_ids) {}

  // Copies chunks [kBegin, kEnd) of 64 columns; `shared` is this thread's piece of its first row in chunk kOrigin.
  template <int kOrigin, int kBegin, int kEnd>
  __device__ __forceinline__ void copy(uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
#pragma unroll
      for (int chunk = kBegin; chunk < kEnd; ++chunk) {
        copy_16_bytes(shared + i * kGatherRowStep * kSwizzleRowBytes + (chunk - kOrigin) * kChunkBytes,
                      g_rows[i] + chunk * kSwizzleRowBytes, visible >> i & 1 ? 16 : 0);
      }
    }
  }
};

// Writes a bit mask of the visible rows of a tile, one word per gathering warp: row r is bit 8 (r % 4) + r / 16 of word
// r / 4 % 4.
__device__ __forceinline__ void publish_visible(uint32_t (&words)[4], const GatherRows& rows, int thread) {
  const uint32_t word = __ballot_sync(~0u, rows.visible >> gather_piece(thread) & 1);
  if (thread % 32 == 0) words[thread / 32] = word;
}

}  // namespace dsa::tiles
