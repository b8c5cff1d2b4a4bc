// Gradients of keys: the copying warps.
#pragma once

#include "key_storage.cuh"
#include "sm90/copy_pairs.cuh"
#include "sm90/memory.cuh"

namespace dsa::sparse_mha_bwd {

// Loads the queries that attend to any key of the block, 64 at a time, with the bits of all its keys.
__device__ __forceinline__ void copy_queries(KeyStorage& shared, const Params& p, const Maps& maps, const KeyItem& item,
                                             int lane) {
  Ring<KeyStorage::kSlots> ring;
  const int row_words = p.mask.q_blocks * (kBlock / 32);
  const uint32_t* g_bits =
      p.mask.queries + ((int64_t{item.batch} * p.mask.kv_blocks + item.block) * kBlock + lane) * row_words;
  for (int head = item.first_head; head < item.end_head; ++head) {
    const int first_tile = (item.batch * p.heads + head) * p.mask.q_blocks * 2;
    for_query_blocks(p, item.batch, item.block, lane, [&](int block, int tile) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int slot = ring.slot, queries = 2 * block + half;
        uint64_t* full = &shared.full[slot];
        wait(&shared.empty[slot], ring.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kBlock / kWarpThreads; ++i) {
          copy_8_bytes(&shared.bits[slot][i * kWarpThreads + lane],
                       g_bits + i * kWarpThreads * row_words + queries * (kTileRows / 32));
        }
        arrive_after_copies(full);
        if (lane == 0) {
          shared.chunks[slot] = tile * 4 + half;
          arrive_and_expect(full, Queries::kBytes);
          const int position = queries * kTileRows;
          load_tile<kColumns>(shared.queries[slot].rows, &maps.q, head, position, item.batch, full);
          load_tile<kValueColumns>(shared.queries[slot].dout, &maps.dout, head, position, item.batch, full);
          bulk_load(shared.bases[slot], p.rows + int64_t{first_tile + queries} * 2 * kTileRows, Queries::kRowBytes,
                    full);
        }
        __syncwarp();
        ring.advance();
      }
    });
  }
  wait_copies<0>();
}

// Loads the keys and values of each head for both warpgroups. Run by one thread.
__device__ __forceinline__ void copy_keys(KeyStorage& shared, const Maps& maps, const KeyItem& item) {
  uint32_t parity = 1;
#pragma unroll 1
  for (int head = item.first_head; head < item.end_head; ++head) {
#pragma unroll 1
    for (int i = 0; i < kKeyWarpgroups; ++i) {
      uint64_t* full = &shared.held_full[i];
      wait(&shared.held_empty[i], parity);
      arrive_and_expect(full, Held::kBytes);
      const int position = item.block * kBlock + i * kTileRows;
      load_keys(shared.held[i].keys, maps, head, position, item.batch, full);
      load_tile<kValueColumns>(shared.held[i].values, &maps.v, head, position, item.batch, full);
    }
    parity ^= 1;
  }
}

}  // namespace dsa::sparse_mha_bwd
