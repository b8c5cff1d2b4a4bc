// The producer side of the ring: loads Q and the gathered keys.
#pragma once

#include "sm90/memory.cuh"
#include "sm90/tma.cuh"
#include "storage.cuh"

namespace dsa::sparse_mla_fwd {

// One value warpgroup's share of filling the ring: Q and then the kv rows of each item, one round of the ring ahead of
// their use.
template <Config kC, bool kBack>
struct Feeder {
  static constexpr bool kSignalOnLanding = signals_on_landing(kC);
  static constexpr int kListedMask =
      kC.is_merged && !is_narrow(kC) ? int(merged_lists::kIdMask) : -1;  // of what is listed
  static constexpr int kBegin = kBack ? kFrontChunks : 0, kEnd = kBack ? kC.d_qk / kChunkColumns : kFrontChunks;

  SharedStorage<kC>& shared;
  const KernelParams& p;
  const CUtensorMap& q_map;
  const int thread;
  int index = blockIdx.x;  // the item after that of tiles_left
  int tiles_left = 0;
  int slots_left;
  VisibleIds visible_ids;
  const int* g_ids;  // this thread's first slot of the next tile
  const char* g_rows;
  int ids[kGatherRowsPerThread];  // of the next tile
  uint32_t landing = 0;           // bit i: the i-th last feed() copied keys, in the i-th last group of copies

  __device__ __forceinline__ uint64_t* full(int at) { return kBack ? &shared.full_back[at] : &shared.full_front[at]; }
  // Arrives for what was written to slot `at`; with kSignalOnLanding, also when its copies are complete.
  __device__ __forceinline__ void signal(int at) {
    arrive(full(at));
    if constexpr (kSignalOnLanding) arrive_after_copies(full(at));
  }

  // Signals the slot that the feed() before the last kLater ones filled with keys, after its copies are complete. The
  // last feed() filled the slot before `at`.
  template <int kLater>
  __device__ __forceinline__ void publish(int at) {
    if (!(landing >> kLater & 1)) return;
    wait_copies<kLater>();
    fence_async_proxy();
    signal(at > kLater ? at - 1 - kLater : at - 1 - kLater + (kBack ? kC.back_stages : kC.front_stages));
  }

  __device__ __forceinline__ void load_ids() {
#pragma unroll
    for (int i = 0; i < kGatherRowsPerThread; ++i) {
      ids[i] = i * kGatherRowStep < slots_left ? __ldg(g_ids + i * kGatherRowStep) & kListedMask : -1;
    }
    g_ids += kBlockK;
    slots_left -= kBlockK;
  }

  // The next tile's rows of keys.
  __device__ __forceinline__ GatherRows find_rows() const {
    if constexpr (kC.is_paged) {
      const auto address_of = [&](int id) {
        const auto& paged = static_cast<const PagedParams&>(p);
        int page, slot;
        paged.page_slots(page, slot, id);
        return g_rows + page * paged.pages.page_bytes + slot * paged.pages.slot_bytes;
      };
      return GatherRows(address_of, ids, visible_ids);
    } else {
      return GatherRows(g_rows, static_cast<uint32_t>(p.kv_stride_s * sizeof(Bf16)), ids, visible_ids);
    }
  }

  // Starts to fill slot `at`, which this warpgroup has read in the ring's round with phase `parity`; chunk 8 is free
  // only after both value warpgroups have read it.
  __device__ __forceinline__ void feed(int at, uint32_t parity) {
    landing <<= 1;
    if (tiles_left > 0) {
      const uint32_t s_piece =
          shared_address(shared.tiles.chunk(at, kBegin)) + swizzled_offset(gather_row(thread), gather_piece(thread));
      const GatherRows rows = find_rows();
      rows.template copy<kBegin, kBegin, kBegin + kFrontChunks>(s_piece);
      if constexpr (kBack) {
        wait(&shared.probs_read[at], parity);
        rows.template copy<kBegin, kBegin + kFrontChunks, kEnd>(s_piece);
      } else {
        publish_visible(shared.visible[at], rows, thread);
      }
      if constexpr (kSignalOnLanding) {
        signal(at);
      } else {
        landing |= 1;
      }
      if (--tiles_left > 0) load_ids();
    } else if (index < items_of(shared, p)) {
      if constexpr (kBack) wait(&shared.probs_read[at], parity);
      const auto item = item_at(shared, p, index);
      index += gridDim.x;
      if (thread == 0) {
        if constexpr (!kBack) shared.item_tiles[parity ^ 1][at] = item.tiles;
        expect_bytes(full(at), (kEnd - kBegin) * kChunkBytes);
#pragma unroll 1
        for (int chunk = kBegin; chunk < kEnd; ++chunk) {
          tma_load(shared.tiles.chunk(at, chunk), &q_map,
                   {chunk * kChunkColumns, item.head_block * kBlockHeads, item.group, item.s, item.b}, full(at));
        }
      }
      signal(at);
      tiles_left = item.tiles;
      const int first_slot = item.first_tile * kBlockK + gather_row(thread);
      slots_left = item.slot_end - first_slot;
      visible_ids = item.ids;
      g_ids = item.indices(p) + first_slot;
      g_rows = reinterpret_cast<const char*>(static_cast<const Bf16*>(p.kv) + item.b * p.kv_stride_b +
                                             item.group * p.kv_stride_g) +
               gather_piece(thread) * 16;
      load_ids();
    }
    if constexpr (!kSignalOnLanding) commit_copies();
  }
};

}  // namespace dsa::sparse_mla_fwd
