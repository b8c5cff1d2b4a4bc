// How keys get into tiles, in the kernel of few heads: a value warpgroup loads its half of the columns of packed keys
// to registers, one tile ahead, and stores them as bf16. It stores the tails of half of the keys too, which need no
// conversion. Scales are left to the scores and P.
//
// A lane finds the address of one of its warp's 16 keys, and loads its scales. Eight lanes load 128 columns of a key at
// once, 16 bytes each: these become two pieces of a row of a chunk. Lanes are in an order in which every eight write
// two neighboring rows of one chunk, and different banks: bit 4 and bit 2 of the lane are the key, bit 3 is the chunk,
// and bits 1 and 0 the 16 columns.
#pragma once

#include "narrow_storage.cuh"
#include "sm90/matrix_copy.cuh"
#include "sm90/register_rows.cuh"
#include "sm90/registers.cuh"
#include "unpack.cuh"

namespace dsa::sparse_mla_decode {

template <int kColumns, int kHeads, bool kBack>
struct NarrowFeeder {
  static constexpr int kWarpKeys = 4, kKeyStep = kWarpKeys * kWarpsPerWarpgroup;  // at once, by a warp and all of them
  static constexpr int kKeys = kTileRows / kKeyStep;                              // that a thread has columns of
  static constexpr int kLoads = kScaleGroups / 2;                                 // of a key's half
  static constexpr int kLoadChunks = kScaleColumns / kChunkColumns, kGroups = kLoads, kChunks = kLoads * kLoadChunks;
  static constexpr int kTailKeys = kColumns > kPackedColumns ? kKeys / 2 : 0, kFirstTailKey = kBack * kTailKeys;
  static_assert(kKeys * kWarpKeys * 2 == kWarpThreads && kLoadChunks == 2);

  NarrowStorage<kColumns, kHeads>& shared;
  const KernelParams& p;
  // The lane's key of the tile after the one in registers.
  int next_item = blockIdx.x;
  int tiles_left = 0;  // of the item, after the tile of `id`
  int slots_left;      // of the item, from the lane's key of the next tile on
  const int* g_ids;
  int id;
  bool has_ids;
  // The tile in registers: first what the lane knows of its own key.
  bool has_keys, visible;
  const char* g_key;
  float2 scales;
  uint4 packed[kKeys][kLoads], tail[kTailKeys > 0 ? kTailKeys : 1];

  __device__ __forceinline__ NarrowFeeder(NarrowStorage<kColumns, kHeads>& shared, const KernelParams& p)
      : shared(shared), p(p) {}

  static __device__ __forceinline__ int lane() { return unsigned(thread_index()) % kWarpThreads; }
  static __device__ __forceinline__ int first_row() {
    return unsigned(thread_index()) % kWarpgroupThreads / kWarpThreads * kWarpKeys;
  }
  // Which of the keys loaded at once the thread has columns of, and its first row of a tile.
  static __device__ __forceinline__ int key_at_once() { return lane() / 16 * 2 + lane() / 4 % 2; }
  static __device__ __forceinline__ int row() { return first_row() + key_at_once(); }
  // The lane's own key; half of the lanes have the same as the others.
  static __device__ __forceinline__ int own_row() {
    return first_row() + lane() / kWarpKeys % kKeys * kKeyStep + lane() % kWarpKeys;
  }
  // The lane whose own key is this thread's r-th.
  static __device__ __forceinline__ int owner(int r) { return r * kWarpKeys + key_at_once(); }
  // This thread's 16 bytes of the tail: rows with different parity differ in the half that eight lanes in a row have.
  static __device__ __forceinline__ int tail_piece() { return (lane() / 8 % 2 ^ lane() / 4 % 2) * 4 + lane() % 4; }

  __device__ __forceinline__ void load_ids() {
    if (tiles_left == 0) {
      has_ids = next_item < p.items;
      if (!has_ids) return;
      const Item item(p, next_item);
      next_item += gridDim.x;
      tiles_left = item.tiles;
      const int first_slot = item.first_tile * kTileKeys + own_row();
      slots_left = item.slot_end - first_slot;
      g_ids = item.indices(p) + first_slot;
    }
    id = slots_left > 0 ? __ldg(g_ids) : -1;
    g_ids += kTileKeys;
    slots_left -= kTileKeys;
    --tiles_left;
  }

  // Finds the key of `id`, and starts to load its scales and the next id.
  __device__ __forceinline__ void find_key() {
    has_keys = has_ids;
    if (!has_ids) return;
    g_key = p.key(id);  // of any id, so that there is no branch
    visible = static_cast<unsigned>(id) < static_cast<unsigned>(p.slots);
    if (!visible) g_key = zeros(blockIdx.x);
    scales = __ldg(reinterpret_cast<const float2*>(g_key + kPackedColumns + kBack * kGroups * 4));
    load_ids();
  }
  // Starts loads [kFirst, kEnd) of the r-th key, with the last one that of the tail.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_key(int r) {
    const char* g = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(g_key), owner(r)));
    const char* g_columns = g + (lane() / 8 % 2 * 4 + lane() % 4) * 16;
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) packed[r][i] = load_once(g_columns + (kBack * kLoads + i) * kScaleColumns);
    if (kEnd == kLoads && kFirstTailKey <= r && r < kFirstTailKey + kTailKeys) {
      tail[r - kFirstTailKey] = load_once(g + kPackedColumns + kScaleBytes + tail_piece() * 16);
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_keys() {
    if (!has_keys) return;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) load_key<kFirst, kEnd>(r);
  }

  // Unpacks loads [kFirst, kEnd) of the r-th key: to `pieces` of eight columns.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_key(int r, uint4 (&pieces)[kKeys][kLoads][2]) const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const uint4& from = packed[r][i];
      pieces[r][i][0] = unpack_piece(from.x, from.y);
      pieces[r][i][1] = unpack_piece(from.z, from.w);
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void unpack_keys(uint4 (&pieces)[kKeys][kLoads][2]) const {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) unpack_key<kFirst, kEnd>(r, pieces);
  }

  // For pieces that are unpacked only if there is a tile.
  template <int kFirst, int kEnd>
  static __device__ __forceinline__ void leave_undefined(int r, uint4 (&pieces)[kKeys][kLoads][2]) {
#pragma unroll
    for (int i = kFirst * 2; i < kEnd * 2; ++i) {
      uint4& piece = pieces[r][i / 2][i % 2];
      sm90::leave_undefined(piece.x), sm90::leave_undefined(piece.y);
      sm90::leave_undefined(piece.z), sm90::leave_undefined(piece.w);
    }
  }

  // Stores them to a tile.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void store_keys(int slot, const uint4 (&pieces)[kKeys][kLoads][2]) const {
    const uint32_t s_row = shared_address(shared.tiles[slot]) + (kBack * kChunks + lane() / 8 % 2) * kChunkBytes +
                           swizzled_offset(row(), 2 * (lane() % 4));
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
#pragma unroll
      for (int i = kFirst; i < kEnd; ++i) {
        const uint32_t s_piece = s_row + i * kLoadChunks * kChunkBytes + r * kKeyStep * kSwizzleRowBytes;
        store_shared(s_piece, pieces[r][i][0]);
        store_shared(s_piece ^ 16, pieces[r][i][1]);
      }
    }
  }

  // Stores what the scores of a tile need besides: tails, scales, and which rows are keys.
  __device__ __forceinline__ void store_notes(int slot) const {
    const uint32_t s_tail = shared_address(shared.tiles[slot]) + kValueChunks * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kTailKeys; ++i) {
      store_shared(s_tail + swizzled_offset(row() + (kFirstTailKey + i) * kKeyStep, tail_piece()), tail[i]);
    }
    if (lane() >= kWarpThreads / 2) return;
    shared.scales[slot][kBack * kGroups][own_row()] = scales.x;
    shared.scales[slot][kBack * kGroups + 1][own_row()] = scales.y;
    if (!kBack) shared.visible[slot][own_row()] = visible;
  }

  // The half is full. The fence before products is the reader's, which has no loads under way.
  __device__ __forceinline__ void signal(int slot) const {
    arrive(kBack ? &shared.full_back[slot] : &shared.full_front[slot]);
  }

  __device__ __forceinline__ void fill(int slot) {
    uint4 pieces[kKeys][kLoads][2];
    store_notes(slot);
    unpack_keys<0, kLoads>(pieces);
    store_keys<0, kLoads>(slot, pieces);
    signal(slot);
  }
  // The first tiles of the CTA; the loads of both travel together.
  __device__ __forceinline__ void fill_stages() {
    static_assert(kNarrowStages == 2);
    load_ids();
    find_key();
    load_keys<0, kLoads>();
    NarrowFeeder first = *this;
    find_key();
    load_keys<0, kLoads>();
    first.fill(0);
    if (!has_keys) return;
    fill(1);
    find_key();
    load_keys<0, kLoads>();
  }
};

}  // namespace dsa::sparse_mla_decode
