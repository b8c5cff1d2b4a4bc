// Pairs of CTAs: the two blocks of 64 heads of a token see the same keys, so the two CTAs of a cluster take one each
// and unpack half of each tile's keys each, in one half of the rows, and send it to the other CTA, to the same place
// there.
//
// By bulk copies, of which a tile takes a dozen: a message of st.async for every 16 bytes would be a thousand, and each
// takes the barrier's time. What is sent must stay until the peer has it: it says so (`received`). Warps of their own
// send: the value warpgroups, which have most to do, need not wait until the peer's slot is free.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/cluster.cuh"
#include "sm90/warpgroup.cuh"
#include "wide_storage.cuh"

namespace dsa::sparse_mla_decode {

// Arrives at the peer's barrier with the place of `barrier`.
__device__ __forceinline__ void tell_peer(const uint64_t* barrier) {
  arrive_remote(remote_address(barrier, cluster_rank() ^ 1));
}

// Before a value warpgroup writes to the tile's slot again, here: the peer has what was sent from it.
template <int kColumns>
__device__ __forceinline__ void wait_until_received(WideStorage<kColumns, true>& shared, unsigned tile) {
  wait(&shared.received[tile % kTiles], tile / kTiles % 2 ^ 1);
}

// This warp of a value warpgroup has multiplied by the tile: when all have, the peer may write to its slot.
template <int kColumns>
__device__ __forceinline__ void free_slot_for_peer(WideStorage<kColumns, true>& shared, bool back, unsigned tile) {
  if (cute::elect_one_sync()) tell_peer(&shared.peer_free[back][tile % kTiles]);
  __syncwarp();
}

// Run by one warp for each value warpgroup: when that has unpacked its part of a tile, sends it, as soon as the peer's
// warpgroup has read what it still has in the slot. The slot becomes full when that of the peer is there too. A lane
// sends one piece: a chunk, the notes, or the tail.
template <int kColumns>
__device__ __forceinline__ void send_keys(WideStorage<kColumns, true>& shared, const KernelParams& p, bool back) {
  constexpr bool kTail = kColumns > kPackedColumns;
  constexpr int kChunk = kWideKeys * kChunkColumns, kSentChunk = kHalfKeys * kChunkColumns;  // elements
  constexpr int kSentChunkBytes = kSentChunk * int(sizeof(Bf16));
  // The part of the notes that the front warpgroup writes; the back one writes the rest.
  constexpr int kFrontNotes = place_of_note(0, ratio_row(1)), kBackNotes = int(sizeof(KeyNotes)) - kFrontNotes;
  static_assert(kFrontNotes % 16 == 0 && kBackNotes % 16 == 0);
  const int lane = threadIdx.x % kWarpThreads, rank = cluster_rank(), peer = rank ^ 1;
  const int chunks = kHalfChunks + (kTail && back), notes_bytes = back ? kBackNotes : kFrontNotes;
  const bool is_notes = lane == chunks;
  const int chunk = lane < kHalfChunks ? back * kHalfChunks + lane : kPackedColumns / kChunkColumns;
  const char* from = is_notes ? reinterpret_cast<const char*>(&shared.notes[0][rank]) + back * kFrontNotes
                              : reinterpret_cast<const char*>(shared.tiles[0] + chunk * kChunk + rank * kSentChunk);
  const int bytes = is_notes ? notes_bytes : kSentChunkBytes;
  const int slot_bytes = is_notes ? sizeof(shared.notes[0]) : sizeof(shared.tiles[0]);
  Ring<kTiles> at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    for (int tiles_left = Item(p, index).template tiles_of<kWideKeys>(); tiles_left > 0; --tiles_left) {
      wait(&shared.unpacked[back][at.slot], at.parity);
      if (lane == 0) arrive_and_expect(&shared.full[at.slot], chunks * kSentChunkBytes + notes_bytes);
      wait(&shared.peer_free[back][at.slot], at.parity ^ 1);
      __syncwarp();  // a lane that sends nothing must not lag behind phases that those that send have ended
      if (lane <= chunks) {
        const char* piece = from + at.slot * slot_bytes;
        bulk_send(remote_address(piece, peer), piece, bytes, remote_address(&shared.full[at.slot], peer));
      }
      at.advance();
    }
  }
}

}  // namespace dsa::sparse_mla_decode
