// Pairs of CTAs: the two blocks of 64 heads of a token see the same keys, so the two CTAs of a cluster take one each
// and unpack half of each tile's keys each, in one half of the rows, and send it to the other CTA, to the same place
// there.
//
// By bulk copies, of which a tile takes a dozen: a message of st.async for every 16 bytes would be a thousand, and each
// takes the barrier's time. What is sent must stay until the peer has it: it says so (`received`).
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/cluster.cuh"
#include "sm90/registers.cuh"
#include "sm90/warpgroup.cuh"
#include "wide_storage.cuh"

namespace dsa::sparse_mla_decode {

// Arrives at the peer's barrier with the place of `barrier`.
__device__ __forceinline__ void tell_peer(const uint64_t* barrier) {
  arrive_remote(remote_address(barrier, cluster_rank() ^ 1));
}

// The keys of one value warpgroup on their way from CTA to CTA. `tile` counts those of all items.
template <int kColumns, bool kBack>
struct PairLink {
  static constexpr bool kTail = kBack && kColumns > kPackedColumns;
  static constexpr int kChunk = kWideKeys * kChunkColumns, kSentChunk = kHalfKeys * kChunkColumns;  // elements
  static constexpr int kSentChunkBytes = kSentChunk * int(sizeof(Bf16));
  // The part of the notes that the warpgroup writes.
  static constexpr int kNotesFrom = kBack ? place_of_factor(0, kHalfGroups) : 0;
  static constexpr int kNotesBytes = (kBack ? int(sizeof(KeyNotes)) : place_of_factor(0, kHalfGroups)) - kNotesFrom;
  static constexpr int kBytes = (kWarpsPerWarpgroup + kTail) * kSentChunkBytes + kNotesBytes;
  static_assert(kHalfColumns == kWarpsPerWarpgroup * kChunkColumns, "a chunk for each warp");
  static_assert(sizeof(KeyNotes) % 16 == 0 && kNotesFrom % 16 == 0 && kNotesBytes % 16 == 0);

  WideStorage<kColumns, true>& shared;

  // The warpgroup has unpacked its part of the tile: the slot becomes full when that of the peer is there too. Sends
  // the part as soon as the peer's warpgroup has read what it still has in the slot.
  __device__ __forceinline__ void publish(unsigned tile) const {
    const int thread = unsigned(thread_index()) % kWarpgroupThreads, warp = thread / kWarpThreads;
    const int slot = tile % kTiles;
    fence_async_proxy();
    if (thread == 0) expect_bytes(&shared.full[slot], kBytes);
    arrive(&shared.full[slot]);
    sync_warpgroup<kBack ? kBackBarrier : kFrontBarrier>();
    if (cute::elect_one_sync()) {
      const int rank = cluster_rank(), peer = rank ^ 1;
      wait(&shared.peer_free[kBack][slot], tile / kTiles % 2 ^ 1);
      const uint32_t full = remote_address(&shared.full[slot], peer);
      const auto send = [&](const void* from, int bytes) { bulk_send(remote_address(from, peer), from, bytes, full); };
      const Bf16* rows = shared.tiles[slot] + rank * kSentChunk;
      send(rows + (kBack * kWarpsPerWarpgroup + warp) * kChunk, kSentChunkBytes);
      if (warp == 0) send(reinterpret_cast<const char*>(&shared.notes[slot][rank]) + kNotesFrom, kNotesBytes);
      if (kTail && warp == 1) send(rows + kPackedColumns / kChunkColumns * kChunk, kSentChunkBytes);
    }
    __syncwarp();
  }

  // All warps have multiplied by the tile, and the peer has what was sent: its slot may be written again, here now, and
  // by the peer as soon as it knows.
  __device__ __forceinline__ void release(unsigned tile) const {
    const bool speaks = unsigned(thread_index()) % kWarpgroupThreads == 0;
    const int slot = tile % kTiles;
    if (speaks) wait(&shared.received[slot], tile / kTiles % 2);
    sync_warpgroup<kBack ? kBackBarrier : kFrontBarrier>();
    if (speaks) tell_peer(&shared.peer_free[kBack][slot]);
    __syncwarp();
  }
};

}  // namespace dsa::sparse_mla_decode
