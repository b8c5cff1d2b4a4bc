// Gathering kv rows into shared memory: which keys are visible to a query, and the cp.async of their columns.
#pragma once

#include <cstdint>

#include "matrix_copy.cuh"

namespace dsa::sm90 {

// The only masking rule: ids in [0, end) are visible; a negative id is padding.
__device__ __forceinline__ bool is_visible(int id, int end) {
  return static_cast<unsigned>(id) < static_cast<unsigned>(end);
}

// Ids below the returned value are visible to query `s`: all keys, or with causal masking those complete at its
// position.
__device__ __forceinline__ int visible_end(int seq_kv, bool causal, int64_t q_start, int64_t positions_per_key, int s) {
  if (!causal) return seq_kv;
  const int64_t end = (q_start + s + 1) / positions_per_key;
  return end < seq_kv ? static_cast<int>(end) : seq_kv;
}

// The leading slots of a query that are in use: all of them, or as many as its entry of topk_length says.
__device__ __forceinline__ int used_slots(int topk, const int* g_length) {
  return g_length == nullptr ? topk : max(0, min(*g_length, topk));
}

// cp.async of 16 bytes, bypassing L1; writes zeros and reads nothing when `bytes` is 0. (A 256-byte L2 prefetch hint
// costs bandwidth when the rows come from HBM: half of what it fetches belongs to other rows.)
__device__ __forceinline__ void copy_16_bytes(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.wait_all: waits until this thread's copies are complete
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

  // `g_first` points to this thread's 16-byte piece of row 0.
  __device__ __forceinline__ GatherRows(const char* g_first, uint32_t row_bytes, const int (&ids)[kGatherRowsPerThread],
                                        int id_end) {
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      const bool is_key = is_visible(ids[i], id_end);
      visible |= is_key << i;
      g_rows[i] = g_first + static_cast<uint64_t>(is_key ? ids[i] : 0) * row_bytes;
    }
    // All addresses before the first copy: with one address register, each row would wait until the copies of the row
    // before are issued.
    asm volatile("" : "+l"(g_rows[0]), "+l"(g_rows[1]), "+l"(g_rows[2]), "+l"(g_rows[3]));
  }

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

__device__ __forceinline__ bool any_visible(const uint32_t (&words)[4]) {
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

// The same mask for keys that are the columns of this thread's 64 x 64 accumulator: bit 8 e + i of `low` is column 16 i
// + lane % 4 * 2 + e; `high` holds the columns 8 further.
struct VisibleColumns {
  static constexpr uint32_t kAll = 0x0f0f;
  uint32_t low, high;

  __device__ __forceinline__ VisibleColumns(const uint32_t (&words)[4], int lane)
      : low(words[lane / 2 % 2] >> lane % 2 * 16 & kAll), high(words[lane / 2 % 2 + 2] >> lane % 2 * 16 & kAll) {}
  __device__ __forceinline__ bool all() const { return (low & high) == kAll; }
  // Whether the column of accumulator `i` is visible.
  __device__ __forceinline__ bool operator[](int i) const {
    return (i / 4 % 2 ? high : low) & 1u << (i % 2 * 8 + i / 8);
  }
};

}  // namespace dsa::sm90
