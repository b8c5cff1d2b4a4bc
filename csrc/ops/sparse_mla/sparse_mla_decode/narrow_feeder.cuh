// How keys get into tiles, in the kernel of few heads: a value warpgroup loads its half of the columns of packed keys
// to registers, one tile ahead, and stores them as bf16. The tail needs no conversion: the back half has it copied to
// the tile, as soon as the scores of the tile before it in the slot are done.
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
  static constexpr int kTailCopies = kBack ? (kColumns - kPackedColumns) * 2 / kLoadBytes : 0;  // of a key
  static_assert(kChunkColumns == kLoadBytes && kTailCopies % 2 == 0);

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
  const char* g_keys[kKeys];
  float2 scales[kKeys];
  uint4 packed[kKeys][kChunks];

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

  // Finds the keys of `ids`.
  __device__ __forceinline__ void find_keys() {
    has_keys = has_ids;
    if (!has_ids) return;
    // Addresses of all ids, so that there is no branch.
    g_keys[0] = p.key(ids[0]), g_keys[1] = p.key(ids[1]);
    hold(g_keys[0], g_keys[1]);
    visible = 0;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const bool is_key = static_cast<unsigned>(ids[r]) < static_cast<unsigned>(p.slots);
      visible |= is_key << r;
      if (!is_key) g_keys[r] = reinterpret_cast<const char*>(g_zeros);
    }
    hold(g_keys[0], g_keys[1]);
  }

  // Starts to load chunks [kFirst, kEnd) of the r-th; with the last one its scales, and after those of the last key the
  // next ids.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_key(int r) {
    if (kEnd == kChunks) {
      scales[r] = __ldg(reinterpret_cast<const float2*>(g_keys[r] + kPackedColumns + kBack * kGroups * 4));
    }
    const char* g_columns = g_keys[r] + lane_of_key() * 16;
#pragma unroll
    for (int chunk = kFirst; chunk < kEnd; ++chunk) {
      packed[r][chunk] = load_once(g_columns + (kBack * kChunks + chunk) * kLoadBytes);
    }
    if (kEnd == kChunks && r == kKeys - 1) load_ids();
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_keys() {
    if (!has_keys) return;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) load_key<kFirst, kEnd>(r);
  }

  // Starts to copy the tails of these keys to a tile; completion counts as another arrival at full_back.
  __device__ __forceinline__ void copy_tail(int slot) const {
    if constexpr (kTailCopies == 0) return;
    const uint32_t s_tail = shared_address(shared.tiles[slot]) + kValueChunks * kChunkBytes;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
#pragma unroll
      for (int i = 0; i < kTailCopies; ++i) {
        const int piece = tail_piece(i);
        copy_16_bytes(s_tail + i / 2 * kChunkBytes + swizzled_offset(row() + r * kKeyStep, piece % 8),
                      g_keys[r] + kPackedColumns + kScaleBytes + piece * 16, 16);
      }
    }
    arrive_after_copies(&shared.full_back[slot]);
  }

  // Unpacks a chunk of the half: to `pieces` of eight columns.
  __device__ __forceinline__ void unpack_chunk(int r, int chunk, uint4 (&pieces)[kKeys][kChunks][2]) const {
    const uint32_t power = SplitScale(chunk < kGroupChunks ? scales[r].x : scales[r].y).power;
    const uint4& from = packed[r][chunk];
    pieces[r][chunk][0] = unpack_piece(from.x, from.y, power);
    pieces[r][chunk][1] = unpack_piece(from.z, from.w, power);
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_key(int r, uint4 (&pieces)[kKeys][kChunks][2]) const {
#pragma unroll
    for (int chunk = kFirst; chunk < kEnd; ++chunk) unpack_chunk(r, chunk, pieces);
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_keys(uint4 (&pieces)[kKeys][kChunks][2]) const {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) unpack_key<kFirst, kEnd>(r, pieces);
  }

  // For pieces that are unpacked only if there is a tile.
  template <int kFirst, int kEnd>
  static __device__ __forceinline__ void leave_undefined(int r, uint4 (&pieces)[kKeys][kChunks][2]) {
#pragma unroll
    for (int i = kFirst * 2; i < kEnd * 2; ++i) {
      uint4& piece = pieces[r][i / 2][i % 2];
      sm90::leave_undefined(piece.x), sm90::leave_undefined(piece.y);
      sm90::leave_undefined(piece.z), sm90::leave_undefined(piece.w);
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

  // Stores the factors of the scales, and which rows are keys.
  __device__ __forceinline__ void store_factors(int slot) const {
    if (lane_of_key() > 0) return;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const int key = row() + r * kKeyStep;
      shared.factors[slot][kBack * kGroups][key] = SplitScale(scales[r].x).factor;
      shared.factors[slot][kBack * kGroups + 1][key] = SplitScale(scales[r].y).factor;
      if (!kBack) shared.visible[slot][key] = visible >> r & 1;
    }
  }

  // The half is full. The fence before products is the reader's, which has no loads under way.
  __device__ __forceinline__ void signal(int slot) const {
    arrive(kBack ? &shared.full_back[slot] : &shared.full_front[slot]);
  }

  __device__ __forceinline__ void fill(int slot) const {
    uint4 pieces[kKeys][kChunks][2];
    static_assert(kChunks == 4);
    store_factors(slot);
    unpack_keys<0, 1>(pieces), store_keys<0, 1>(slot, pieces);
    unpack_keys<1, 2>(pieces), store_keys<1, 2>(slot, pieces);
    unpack_keys<2, 3>(pieces), store_keys<2, 3>(slot, pieces);
    unpack_keys<3, 4>(pieces), store_keys<3, 4>(slot, pieces);
    signal(slot);
  }
  // The first tiles of the CTA; the loads of both travel together.
  __device__ __forceinline__ void fill_stages() {
    static_assert(kNarrowStages == 2);
    load_ids();
    find_keys();
    copy_tail(0);
    load_keys<0, kChunks>();
    const NarrowFeeder first = *this;
    find_keys();
    if (has_keys) copy_tail(1);
    load_keys<0, kChunks>();
    first.fill(0);
    if (!has_keys) return;
    fill(1);
    find_keys();
    load_keys<0, kChunks>();
  }
};

}  // namespace dsa::sparse_mla_decode
