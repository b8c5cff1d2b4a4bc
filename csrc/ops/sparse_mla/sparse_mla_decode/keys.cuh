// Keys on their way from the cache to the tensor cores: from global memory to registers, there to bf16, and as values
// to shared memory.
//
// Keys are rows (M) of S^T = K Q^T. A thread loads and multiplies two keys of a tile: those of rows lane / 4 and
// lane / 4 + 8 of its warp's 16. Four lanes share a key; each loads 16 bytes of every 64. The columns that a lane loads
// are those that it holds as fragments of wgmma's A operand, because the columns of Q in shared memory are permuted
// alike (pair_offset); and so are those of values, and of O.
#pragma once

#include <cstdint>

#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/warpgroup.cuh"
#include "storage.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

inline constexpr int kRowStep = 8;                               // between a thread's two keys
inline constexpr int kLoadBytes = 64;                            // of a key, by four lanes at once
inline constexpr int kFragmentWords = 16;                        // of 64 columns of two keys
inline constexpr int kTailBytes = kPackedColumns + kScaleBytes;  // of a packed key, before the tail

// A thread's two ids of each tile, of all items of the CTA one after another.
struct IdStream {
  const KernelParams& p;
  int next_item = blockIdx.x;
  int slots_left = -kTileKeys;  // of the item's, from this thread's first row of the next tile on
  const int* g_ids;

  __device__ __forceinline__ explicit IdStream(const KernelParams& p) : p(p) {}

  // The ids of the next tile; -1 after the last one.
  __device__ __forceinline__ void take(int (&ids)[2]) {
    const int row = fragment_row();
    if (slots_left + row <= 0) {
      if (next_item >= p.items) {
        ids[0] = ids[1] = -1;
        return;
      }
      const Item item(p, next_item);
      next_item += gridDim.x;
      const int first_slot = item.first_tile * kTileKeys + row;
      slots_left = item.slot_end - first_slot;
      g_ids = item.indices(p) + first_slot;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) ids[r] = r * kRowStep < slots_left ? __ldg(g_ids + r * kRowStep) : -1;
    g_ids += kTileKeys;
    slots_left -= kTileKeys;
  }
};

// A thread's two keys of a tile.
template <Config kC>
struct KeyRows {
  static constexpr int kRowBytes = row_bytes(kC);

  const char* g_rows[2];  // at this lane's 16 bytes of the first 64
  unsigned visible = 0;   // bit r < 2: the r-th is a key

  __device__ __forceinline__ KeyRows(const KernelParams& p, const int (&ids)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_key = static_cast<unsigned>(ids[r]) < static_cast<unsigned>(p.slots);
      visible |= is_key << r;
      int page, slot;
      p.page_slots(page, slot, is_key ? ids[r] : 0);
      const char* g_row = static_cast<const char*>(p.kv_cache) + page * p.page_bytes + slot * p.slot_bytes;
      g_rows[r] = (is_key ? g_row : reinterpret_cast<const char*>(g_zeros)) + warpgroup_thread() % 4 * 16;
    }
  }

  // So that a tile's loads find it in L2. The four lanes of a key have the same address but for their offset in it.
  __device__ __forceinline__ void prefetch() const {
    if (warpgroup_thread() % 4 != 0) return;
    prefetch_l2(g_rows[0], kRowBytes);
    prefetch_l2(g_rows[1], kRowBytes);
  }

  // The four scales of the r-th key.
  __device__ __forceinline__ float4 scales(int r) const {
    const uint4 bits = load_once(g_rows[r] + kPackedColumns - warpgroup_thread() % 4 * 16);
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
  }
};

// 64 bf16 columns of both keys, from byte `byte` of a row on, as fragments: word 4 step + 2 half + key of four wgmma
// steps.
template <Config kC>
__device__ __forceinline__ void load_fragments(uint32_t* fragments, const KeyRows<kC>& keys, int byte) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = load_once(keys.g_rows[r] + byte + i * kLoadBytes);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) fragments[4 * (2 * i + j / 2) + r + j % 2 * 2] = words[j];
    }
  }
}

// 64 packed columns of both keys as fragments. `powers`: of the scales of the two keys.
__device__ __forceinline__ void unpack_fragments(uint32_t* fragments, const uint4 (&packed)[2],
                                                 const uint32_t (&powers)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t words[4] = {packed[r].x, packed[r].y, packed[r].z, packed[r].w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint2 pairs = e4m3_to_bf16(words[step]);
      fragments[4 * step + r] = multiply_bf16(pairs.x, powers[r]);
      fragments[4 * step + 2 + r] = multiply_bf16(pairs.y, powers[r]);
    }
  }
}

// Fragments of 64 columns as values: a thread's two rows of a chunk, whose columns stay in the order of the fragments.
__device__ __forceinline__ void store_values(uint32_t s_chunk, const uint32_t* fragments, int thread) {
  const int lane = thread % kWarpThreads, row = thread / kWarpThreads * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kFragmentWords / 4; ++step) {
    const uint32_t* words = fragments + 4 * step;
    store_matrices(s_chunk + swizzled_offset(row, 2 * step + lane / 16), words[0], words[1], words[2], words[3]);
  }
}

// Eight columns of a head of Q, the p-th of a chunk.
__device__ __forceinline__ void store_query_piece(uint32_t s_chunk, int head, int p, bool is_packed,
                                                  const uint4& piece) {
  const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    store_shared(s_chunk + pair_offset(head, p, j, is_packed), static_cast<int>(pairs[j]));
  }
}

// Q of an item, with the sign of the scale.
template <Config kC>
__device__ __forceinline__ void load_queries(SharedStorage<kC>& shared, const KernelParams& p, const Item& item) {
  const int thread = warpgroup_thread();
  constexpr int kPieces = kChunkColumns / kPieceColumns, kChunkPieces = kC.heads * kPieces;
  constexpr int kLoads = kC.d_qk / kPieceColumns * kC.heads / kWarpgroupThreads;
  static_assert(kChunkPieces % kWarpgroupThreads == 0);
  const auto* g_q = static_cast<const Bf16*>(p.q) + item.b * p.q_stride_b + item.n * p.q_stride_n;
  const int first_head = item.first_head(p), heads_left = item.heads_left(p);
  const uint32_t flip = p.negate_q ? 0x80008000u : 0u;
#pragma unroll 6
  for (int i = 0; i < kLoads; ++i) {
    const int index = i * kWarpgroupThreads + thread;
    const int chunk = index / kChunkPieces, head = index % kChunkPieces / kPieces, piece = index % kPieces;
    uint4 v{};
    if (head < heads_left) {
      v = load_once(g_q + (first_head + head) * p.q_stride_h + chunk * kChunkColumns + piece * kPieceColumns);
    }
    store_query_piece(shared_address(shared.q) + chunk * kC.heads * kSwizzleRowBytes, head, piece,
                      kC.is_packed && chunk < kValueChunks, {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip});
  }
}

}  // namespace dsa::sparse_mla_decode
