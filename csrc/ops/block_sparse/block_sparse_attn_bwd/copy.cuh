// The copying warps: take items and load their blocks.
#pragma once

#include "stream.cuh"

namespace dsa::block_sparse_attn_bwd {

// Takes the next place in the order of work from a global counter. Run by one warp.
__device__ __forceinline__ int64_t take(const Params& p, int lane) {
  unsigned long long place = 0;
  if (lane == 0) place = atomicAdd(p.next_place, 1);
  return static_cast<int64_t>(__shfl_sync(~0u, place, 0));
}

// The length of the longest list of all heads. Run by one warp.
__device__ __forceinline__ int longest_list(const Params& p, int lane) {
  int longest = 0;
  for (int i = lane; i < p.batch * p.heads; i += kWarpThreads) longest = max(longest, __ldg(p.longest + i));
  return __reduce_max_sync(~0u, longest);
}

template <int kColumns>
struct Copier {
  static constexpr int kTileBytes = sizeof(Tile<kColumns>), kRowBytes = 2 * kBlock * sizeof(float);

  Stream<kColumns>& shared;
  const Params& p;
  const Maps& maps;
  const Units& units;
  int lane;
  Walk<Stream<kColumns>::kSlots> walk{};

  // Runs fill(slot) in one thread, which must arrive at its barrier `full`, once the slot is free.
  template <class Fill>
  __device__ __forceinline__ void fill_slot(const Fill& fill) {
    wait(&shared.empty[walk.slot], walk.parity() ^ 1);
    if (lane == 0) fill(walk.slot);
    __syncwarp();
  }

  __device__ __forceinline__ void stop() {
    fill_slot([&](int slot) {
      shared.headers[slot].kind = kStop;
      arrive(&shared.full[slot]);
    });
  }

  // The slots of [begin, end) of a head's transposed list whose query blocks are in [first_block, end_block), in order.
  template <class Found>
  __device__ __forceinline__ void for_queries(const int* g_listing, int begin, int end, int first_block, int end_block,
                                              const Found& found) {
    if (first_block > 0) {  // skip most of what comes before
      const int step = divide_up(end - begin, kWarpThreads), probe = begin + lane * step;
      const bool is_before = probe < end && __ldg(g_listing + probe) / p.slots < first_block;
      begin += max(0, __popc(__ballot_sync(~0u, is_before)) - 1) * step;
    }
    for (int first = begin; first < end; first += kWarpThreads) {
      const int slot_of_lane = first + lane < end ? __ldg(g_listing + first + lane) : -1;
      const int block_of_lane = slot_of_lane < 0 ? end_block : slot_of_lane / p.slots;
      const bool is_own = block_of_lane >= first_block && block_of_lane < end_block;
      for (unsigned left = __ballot_sync(~0u, is_own); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int block = __shfl_sync(~0u, block_of_lane, from);
        found(block, __shfl_sync(~0u, slot_of_lane, from) - block * p.slots);
      }
      if (__any_sync(~0u, block_of_lane >= end_block)) return;
    }
  }

  __device__ __forceinline__ void send_keys(const Work& work) {
    const int head = work.head % p.kv_heads, batch = work.head / p.kv_heads, group = p.heads / p.kv_heads;
    const int position = work.block * kBlock;
    const bool continues = !units.is_first_part(work.unit), is_continued = !units.is_last_part(work.unit);
    fill_slot([&](int slot) {
      const int unit_before = work.unit - p.plan.buffers;  // of the same buffer
      if (unit_before >= 0) wait_done(p.queries_done(unit_before), units.query_items(unit_before));
      if (units.has_parts()) wait_done(p.units_summed(work.block), work.unit);
      uint64_t* full = &shared.full[slot];
      shared.headers[slot].kind = kKeys, shared.headers[slot].value = continues ? work.block : -1;
      arrive_and_expect(full, 2 * kTileBytes);
      copy_block<kColumns>(shared.slots[slot].rows, &maps.k, head, position, batch, full);
      copy_block<kColumns>(shared.slots[slot].factors, &maps.v, head, position, batch, full);
    });
    walk.hold();
    const int unit_begin = units.first_block(work.unit), unit_end = units.end_block(work.unit);
    for (int i = unit_begin / p.q_blocks; i * p.q_blocks < unit_end; ++i) {
      const int query_head = head * group + i;
      const int64_t list = static_cast<int64_t>(batch) * p.heads + query_head;
      const int* g_offset = p.offsets + list * (p.kv_blocks + 1) + work.block;
      const int before = i * p.q_blocks;
      const auto send = [&](int block, int list_slot) {
        fill_slot([&](int slot) {
          uint64_t* full = &shared.full[slot];
          shared.headers[slot].kind = kPair;
          shared.headers[slot].value = units.first_tile(work.unit, work.head, before + block) + list_slot;
          arrive_and_expect(full, 2 * kTileBytes + kRowBytes);
          copy_block<kColumns>(shared.slots[slot].rows, &maps.q, query_head, block * kBlock, batch, full);
          copy_block<kColumns>(shared.slots[slot].factors, &maps.dout, query_head, block * kBlock, batch, full);
          bulk_load(shared.bases[slot], p.rows + (list * p.q_blocks + block) * 2 * kBlock, kRowBytes, full);
        });
        walk.advance();
      };
      for_queries(p.listing + list * p.q_blocks * p.slots, __ldg(g_offset), __ldg(g_offset + 1),
                  max(0, unit_begin - before), min(p.q_blocks, unit_end - before), send);
    }
    fill_slot([&](int slot) {
      const int keys = valid_keys(p, work.block), summed_block = units.has_parts() ? work.block : -1;
      shared.headers[slot] = {kEnd, is_continued, work.unit, head, position, batch, keys, summed_block};
      arrive(&shared.full[slot]);
    });
    walk.end_item();
  }

  __device__ __forceinline__ void send_queries(const Work& work) {
    const int group = p.heads / p.kv_heads;
    const int kv_head = work.head % p.kv_heads;
    Item item(0, p.q_blocks, p.heads);
    item.block = work.block % p.q_blocks, item.head = kv_head * group + work.block / p.q_blocks;
    item.batch = work.head / p.kv_heads;
    if (lane == 0) {
      wait_done(p.keys_done(work.unit), units.key_items(work.unit));
      fence_async_proxy_global();
    }
    __syncwarp();
    const int first_tile = units.first_tile(work.unit, work.head, work.block);
    const List list = listed_blocks(p, item);
    for (int first = 0; first < list.count; first += kWarpThreads) {
      const int id = first + lane < list.count ? __ldg(list.g_ids + first + lane) : -1, keys = valid_keys(p, id);
      for (unsigned left = __ballot_sync(~0u, keys > 0); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int position = __shfl_sync(~0u, id, from) * kBlock, valid = __shfl_sync(~0u, keys, from);
        fill_slot([&](int slot) {
          uint64_t* full = &shared.full[slot];
          shared.headers[slot].kind = kPair, shared.headers[slot].value = valid;
          arrive_and_expect(full, kTileBytes + kPairBytes);
          const char* g_tile = p.gradients + static_cast<int64_t>(first_tile + first + from) * kPairBytes;
          bulk_load_once(shared.slots[slot].factors, g_tile, kPairBytes, full);
          copy_block<kColumns>(shared.slots[slot].rows, &maps.k, kv_head, position, item.batch, full);
        });
        walk.advance();
      }
    }
    fill_slot([&](int slot) {
      shared.headers[slot] = {kEnd, 0, work.unit, item.head, item.block * kBlock, item.batch, 0, -1};
      arrive(&shared.full[slot]);
    });
    walk.end_item();
  }
};

template <int kColumns>
__device__ __forceinline__ void copy(Stream<kColumns>& shared, const Params& p, const Maps& maps, int lane) {
  const Units units(p.plan, longest_list(p, lane));
  Copier<kColumns> copier{shared, p, maps, units, lane};
  for (int64_t place = take(p, lane); place < units.places(); place = take(p, lane)) {
    Work work;
    if (!units.find(place, work)) continue;
    if (work.for_keys) {
      copier.send_keys(work);
    } else {
      copier.send_queries(work);
    }
  }
  copier.stop();
}

}  // namespace dsa::block_sparse_attn_bwd
