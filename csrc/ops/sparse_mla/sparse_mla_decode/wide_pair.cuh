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
template <int kColumns>
struct PairLink {
  static constexpr bool kTail = kColumns > kPackedColumns;
  static constexpr int kChunk = kWideKeys * kChunkColumns, kSentChunk = kHalfKeys * kChunkColumns;  // elements
  static constexpr int kSentChunkBytes = kSentChunk * int(sizeof(Bf16));
  // The part of the notes that the front warpgroup writes; the back one writes the rest.
  static constexpr int kFrontNotes = place_of_factor(0, kHalfGroups), kBackNotes = int(sizeof(KeyNotes)) - kFrontNotes;
  static_assert(kHalfChunks == kWarpsPerWarpgroup, "a chunk for each warp");
  static_assert(kFrontNotes % 16 == 0 && kBackNotes % 16 == 0);

  WideStorage<kColumns, true>& shared;
  const bool back;

  // Before the warpgroup writes to the tile's slot again, here: the peer has what was sent from it.
  __device__ __forceinline__ void wait_until_received(unsigned tile) const {
    wait(&shared.received[tile % kTiles], tile / kTiles % 2 ^ 1);
  }

  // The warpgroup has unpacked its part of the tile: the slot becomes full when that of the peer is there too. Sends
  // the part as soon as the peer's warpgroup has read what it still has in the slot.
  __device__ __forceinline__ void publish(unsigned tile) const {
    const int thread = unsigned(thread_index()) % kWarpgroupThreads, warp = thread / kWarpThreads;
    const int slot = tile % kTiles, notes_bytes = back ? kBackNotes : kFrontNotes;
    const bool tail = kTail && back;
    fence_async_proxy();
    if (thread == 0) expect_bytes(&shared.full[slot], (kHalfChunks + tail) * kSentChunkBytes + notes_bytes);
    arrive(&shared.full[slot]);
    sync_warpgroup(value_barrier(back));
    if (cute::elect_one_sync()) {
      const int rank = cluster_rank(), peer = rank ^ 1;
      wait(&shared.peer_free[back][slot], tile / kTiles % 2 ^ 1);
      const uint32_t full = remote_address(&shared.full[slot], peer);
      const auto send = [&](const void* from, int bytes) { bulk_send(remote_address(from, peer), from, bytes, full); };
      const Bf16* rows = shared.tiles[slot] + rank * kSentChunk;
      send(rows + (back * kHalfChunks + warp) * kChunk, kSentChunkBytes);
      if (warp == 0) {
        send(reinterpret_cast<const char*>(&shared.notes[slot][rank]) + back * kFrontNotes, notes_bytes);
      }
      if (tail && warp == 1) send(rows + kPackedColumns / kChunkColumns * kChunk, kSentChunkBytes);
    }
    __syncwarp();
  }

  // This warp has multiplied by the tile: when all have, the peer may write to its slot.
  __device__ __forceinline__ void release(unsigned tile) const {
    if (cute::elect_one_sync()) tell_peer(&shared.peer_free[back][tile % kTiles]);
    __syncwarp();
  }
};

}  // namespace dsa::sparse_mla_decode
