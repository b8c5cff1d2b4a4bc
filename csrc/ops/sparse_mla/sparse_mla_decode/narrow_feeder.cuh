// How keys get into tiles, in the kernel of few heads: a value warpgroup loads its half of the columns of packed keys
// to registers, one tile ahead, and stores them as bf16.
//
// A thread has two keys of a tile, 32 rows apart, which it shares with three neighbors. Each loads 16 bytes of every
// 64: these become two pieces of a row of a chunk. Eight lanes in a row store pieces of two rows, one odd and one even:
// to different banks.
#pragma once

#include "narrow_storage.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

template <int kColumns, int kHeads, bool kBack>
struct NarrowFeeder {
  static constexpr int kKeys = 2, kKeyStep = kTileRows / kKeys;
  static constexpr int kChunks = kValueChunks / 2, kGroups = kScaleGroups / 2;  // of a half
  static constexpr int kGroupChunks = kChunks / kGroups;
  static constexpr int kLanesPerKey = 4, kLoadBytes = 16 * kLanesPerKey;
  static constexpr int kTailLoads = kBack ? (kColumns - kPackedColumns) * 2 / kLoadBytes : 0;  // of a key
  static_assert(kChunkColumns == kLoadBytes && kTailLoads % 2 == 0);

  NarrowStorage<kColumns, kHeads>& shared;
  const KernelParams& p;
  // Ids of the tile after the one in registers.
  int next_item = blockIdx.x;
  int tiles_left = 0;  // of the item, after the tile of `ids`
  int slots_left;      // of the item, from this thread's first row of the next tile on
  const int* g_ids;
  int ids[kKeys];
  bool has_ids;
  // The tile in registers.
  bool has_keys;
  unsigned visible;  // bit r: the r-th row is a key
  float2 scales[kKeys];
  uint4 packed[kKeys][kChunks], tail[kKeys][kTailLoads > 0 ? kTailLoads : 1];

  __device__ __forceinline__ NarrowFeeder(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p)
      : shared(shared), p(p) {}

  // The thread's first row of a tile, and its 16 bytes of 64.
  static __device__ __forceinline__ int row() { return unsigned(thread_index()) % kWarpgroupThreads / kLanesPerKey; }
  static __device__ __forceinline__ int lane_of_key() { return unsigned(thread_index()) % kLanesPerKey; }
  // The i-th piece of the tail that this thread copies: rows with different parity differ, as for the other columns.
  static __device__ __forceinline__ int tail_piece(int i) {
    return i / 2 * 8 + (i % 2 ^ row() % 2) * kLanesPerKey + lane_of_key();
  }

  __device__ __forceinline__ void load_ids() {
    if (tiles_left == 0) {
      has_ids = next_item < p.items;
      if (!has_ids) return;
      const Item item(p, next_item);
      next_item += gridDim.x;
      tiles_left = item.tiles;
      const int first_slot = item.first_tile * kTileKeys + row();
      slots_left = item.slot_end - first_slot;
      g_ids = item.indices(p) + first_slot;
    }
#pragma unroll
    for (int r = 0; r < kKeys; ++r) ids[r] = r * kKeyStep < slots_left ? __ldg(g_ids + r * kKeyStep) : -1;
    g_ids += kTileKeys;
    slots_left -= kTileKeys;
    --tiles_left;
  }

  // Starts to load the keys of `ids`, and the ids after them.
  __device__ __forceinline__ void load_keys() {
    has_keys = has_ids;
    if (!has_ids) return;
    visible = 0;
    const char* g_keys[kKeys];
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const bool is_key = static_cast<unsigned>(ids[r]) < static_cast<unsigned>(p.slots);
      visible |= is_key << r;
      g_keys[r] = is_key ? p.key(ids[r]) : reinterpret_cast<const char*>(g_zeros);
    }
    hold(g_keys[0], g_keys[1]);
    const int first = lane_of_key() * 16;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      scales[r] = __ldg(reinterpret_cast<const float2*>(g_keys[r] + kPackedColumns + kBack * kGroups * 4));
      const char* g_columns = g_keys[r] + first;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        packed[r][chunk] = load_once(g_columns + (kBack * kChunks + chunk) * kLoadBytes);
      }
#pragma unroll
      for (int i = 0; i < kTailLoads; ++i) {
        tail[r][i] = load_once(g_keys[r] + kPackedColumns + kScaleBytes + tail_piece(i) * 16);
      }
    }
    load_ids();
  }

  // Unpacks chunks [kFirst, kEnd) of the half: to `pieces` of eight columns.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_keys(uint4 (&pieces)[kKeys][kChunks][2]) const {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const uint32_t powers[kGroups] = {SplitScale(scales[r].x).power, SplitScale(scales[r].y).power};
#pragma unroll
      for (int chunk = kFirst; chunk < kEnd; ++chunk) {
        const uint4& from = packed[r][chunk];
        pieces[r][chunk][0] = unpack_piece(from.x, from.y, powers[chunk / kGroupChunks]);
        pieces[r][chunk][1] = unpack_piece(from.z, from.w, powers[chunk / kGroupChunks]);
      }
    }
  }

  template <int kFirst, int kEnd>
  static __device__ __forceinline__ void clear(uint4 (&pieces)[kKeys][kChunks][2]) {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
#pragma unroll
      for (int chunk = kFirst; chunk < kEnd; ++chunk) pieces[r][chunk][0] = pieces[r][chunk][1] = {};
    }
  }

  // Stores them to a tile.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void store_keys(int slot, const uint4 (&pieces)[kKeys][kChunks][2]) const {
    const uint32_t s_row =
        shared_address(shared.tiles[slot]) + kBack * kChunks * kChunkBytes + swizzled_offset(row(), 2 * lane_of_key());
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
#pragma unroll
      for (int chunk = kFirst; chunk < kEnd; ++chunk) {
        const uint32_t s_piece = s_row + chunk * kChunkBytes + r * kKeyStep * kSwizzleRowBytes;
        store_shared(s_piece, pieces[r][chunk][0]);
        store_shared(s_piece ^ 16, pieces[r][chunk][1]);
      }
    }
  }

  // The rest of a tile: the tail, the factors of the scales, and which rows are keys. Then the half is full.
  __device__ __forceinline__ void finish_tile(int slot) const {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const uint32_t s_tail = shared_address(shared.tiles[slot]) + kValueChunks * kChunkBytes;
#pragma unroll
      for (int i = 0; i < kTailLoads; ++i) {
        store_shared(s_tail + i / 2 * kChunkBytes + swizzled_offset(row() + r * kKeyStep, tail_piece(i) % 8),
                     tail[r][i]);
      }
      if (lane_of_key() == 0) {
        const int key = row() + r * kKeyStep;
        shared.factors[slot][kBack * kGroups][key] = SplitScale(scales[r].x).factor;
        shared.factors[slot][kBack * kGroups + 1][key] = SplitScale(scales[r].y).factor;
        if (!kBack) shared.visible[slot][key] = visible >> r & 1;
      }
    }
    fence_async_proxy();
    arrive(kBack ? &shared.full_back[slot] : &shared.full_front[slot]);
  }

  __device__ __forceinline__ void fill(int slot) const {
    uint4 pieces[kKeys][kChunks][2];
    static_assert(kChunks == 4);
    unpack_keys<0, 1>(pieces), store_keys<0, 1>(slot, pieces);
    unpack_keys<1, 2>(pieces), store_keys<1, 2>(slot, pieces);
    unpack_keys<2, 3>(pieces), store_keys<2, 3>(slot, pieces);
    unpack_keys<3, 4>(pieces), store_keys<3, 4>(slot, pieces);
    finish_tile(slot);
  }
  // The first tiles of the CTA; the loads of both travel together.
  __device__ __forceinline__ void fill_stages() {
    static_assert(kNarrowStages == 2);
    load_ids();
    load_keys();
    const NarrowFeeder first = *this;
    load_keys();
    first.fill(0);
    if (!has_keys) return;
    fill(1);
    load_keys();
  }
};

}  // namespace dsa::sparse_mla_decode
