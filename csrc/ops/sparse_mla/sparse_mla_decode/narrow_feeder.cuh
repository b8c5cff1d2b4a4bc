// How keys get into tiles, in the kernel of few heads: a value warpgroup loads its quarter of the columns of packed keys
// to registers, one tile ahead, and stores them as bf16. It also copies a quarter of the tail.
//
// A thread has two keys of a tile, 32 rows apart, which it shares with three neighbors. Each loads 16 bytes of every
// 64: these become two pieces of a row of a chunk. Eight lanes in a row store pieces of two rows, one odd and one even:
// to different banks. Of the tail, each of the four lanes copies one piece, of one of the keys.
#pragma once

#include "narrow_storage.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/memory.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

// What is read in place of a key where there is none.
static __device__ const uint4 g_zeros[packed_bytes(576) / 16] = {};

template <int kColumns, int kHeads>
struct NarrowFeeder {
  static constexpr int kKeys = 2, kKeyStep = kTileRows / kKeys;
  static constexpr int kLanesPerKey = 4, kLoadBytes = 16 * kLanesPerKey;
  static constexpr bool kTail = kColumns > kPackedColumns;
  static_assert(kChunkColumns == kLoadBytes && (kColumns - kPackedColumns) % (kValueWarpgroups * kPieceColumns) == 0);
  using Pieces = uint4[kKeys][kOwnChunks][2];  // of eight columns

  NarrowStorage<kColumns, kHeads>& shared;
  const KernelParams& p;
  int quarter;  // of the columns
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
  float scales[kKeys];
  uint4 packed[kKeys][kOwnChunks], tail;

  __device__ __forceinline__ NarrowFeeder(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p, int quarter)
      : shared(shared), p(p), quarter(quarter) {}

  // The thread's first row of a tile, and its 16 bytes of 64.
  static __device__ __forceinline__ int row() { return unsigned(thread_index()) % kWarpgroupThreads / kLanesPerKey; }
  static __device__ __forceinline__ int lane_of_key() { return unsigned(thread_index()) % kLanesPerKey; }
  // Of which of its keys the thread copies a piece of the tail, and which piece.
  static __device__ __forceinline__ int tail_key() { return lane_of_key() / 2; }
  __device__ __forceinline__ int tail_piece() const { return quarter * 2 + lane_of_key() % 2; }

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
      int page, slot;
      p.page_slots(page, slot, is_key ? ids[r] : 0);
      const char* g_key = static_cast<const char*>(p.kv_cache) + page * p.page_bytes + slot * p.slot_bytes;
      g_keys[r] = is_key ? g_key : reinterpret_cast<const char*>(g_zeros);
    }
    hold(g_keys[0], g_keys[1]);
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      scales[r] = __ldg(reinterpret_cast<const float*>(g_keys[r] + kPackedColumns) + quarter);
      const char* g_columns = g_keys[r] + quarter * kOwnColumns + lane_of_key() * 16;
#pragma unroll
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) packed[r][chunk] = load_once(g_columns + chunk * kLoadBytes);
    }
    if constexpr (kTail) {
      const char* g_tail = (tail_key() == 0 ? g_keys[0] : g_keys[1]) + kPackedColumns + kScaleBytes;
      tail = load_once(g_tail + tail_piece() * 16);
    }
    load_ids();
  }

  // Of the thread's keys [kFirst, kEnd).
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_keys(Pieces& pieces) const {
#pragma unroll
    for (int r = kFirst; r < kEnd; ++r) {
      const uint32_t power = SplitScale(scales[r]).power;
#pragma unroll
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
        const uint4& from = packed[r][chunk];
        pieces[r][chunk][0] = unpack_piece(from.x, from.y, power);
        pieces[r][chunk][1] = unpack_piece(from.z, from.w, power);
      }
    }
  }

  template <int kFirst, int kEnd>
  static __device__ __forceinline__ void clear(Pieces& pieces) {
#pragma unroll
    for (int r = kFirst; r < kEnd; ++r) {
#pragma unroll
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) pieces[r][chunk][0] = pieces[r][chunk][1] = {};
    }
  }

  // The pieces, the tail, the factors of the scales, and which rows are keys, to a tile; its half may then be full.
  __device__ __forceinline__ void store_keys(int slot, const Pieces& pieces) const {
    const uint32_t s_tile = shared_address(shared.tiles[slot]);
    const uint32_t s_row = s_tile + quarter * kOwnChunks * kChunkBytes + swizzled_offset(row(), 2 * lane_of_key());
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
#pragma unroll
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
        const uint32_t s_piece = s_row + chunk * kChunkBytes + r * kKeyStep * kSwizzleRowBytes;
        store_shared(s_piece, pieces[r][chunk][0]);
        store_shared(s_piece ^ 16, pieces[r][chunk][1]);
      }
    }
    if constexpr (kTail) {
      store_shared(s_tile + kValueChunks * kChunkBytes + swizzled_offset(row() + tail_key() * kKeyStep, tail_piece()),
                   tail);
    }
    if (lane_of_key() == 0) {
#pragma unroll
      for (int r = 0; r < kKeys; ++r) {
        const int key = row() + r * kKeyStep;
        shared.factors[slot][quarter][key] = SplitScale(scales[r]).factor;
        if (quarter == 0) shared.visible[slot][key] = visible >> r & 1;
      }
    }
    fence_async_proxy();
    arrive(&shared.full[slot][quarter / 2]);
  }

  __device__ __forceinline__ void fill(int slot) const {
    Pieces pieces;
    unpack_keys<0, kKeys>(pieces);
    store_keys(slot, pieces);
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
