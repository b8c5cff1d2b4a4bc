// The copying warps: take items and load their blocks.
#pragma once

#include "stream.cuh"

namespace dsa::block_sparse_attn_bwd {

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
  unsigned long long taken = 0;  // of lane 0

  // Takes the next place in the order of work from a global counter. The end of an item begins to, so that the answer
  // arrives while the warp waits for a slot.
  __device__ __forceinline__ void take() {
    if (lane == 0) taken = atomicAdd(p.next_place, 1);
  }
  __device__ __forceinline__ int64_t taken_place() const { return static_cast<int64_t>(__shfl_sync(~0u, taken, 0)); }

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
    const int unit_begin = units.first_block(work.unit), unit_end = units.end_block(work.unit);
    const int64_t first_list = static_cast<int64_t>(batch) * p.heads + head * group;
    const auto offsets_of = [&](int i) { return p.offsets + (first_list + i) * (p.kv_blocks + 1) + work.block; };
    int i = unit_begin / p.q_blocks;  // query head of the group
    // Of the next query head's transposed list. Under way while the warp waits.
    int next_begin = __ldg(offsets_of(i)), next_end = __ldg(offsets_of(i) + 1);
    if (lane == 0) {
      const int unit_before = work.unit - p.plan.buffers;  // of the same buffer
      if (unit_before >= 0) wait_done(p.queries_done(unit_before), units.query_items(unit_before));
      if (units.has_parts()) wait_done(p.units_summed(work.block), work.unit);
    }
    __syncwarp();
    fill_slot([&](int slot) {
      uint64_t* full = &shared.full[slot];
      shared.headers[slot].kind = kKeys, shared.headers[slot].value = continues ? work.block : -1;
      arrive_and_expect(full, 2 * kTileBytes);
      copy_block<kColumns>(shared.slots[slot].rows, &maps.k, head, position, batch, full);
      copy_block<kColumns>(shared.slots[slot].factors, &maps.v, head, position, batch, full);
    });
    walk.hold();
    for (; i * p.q_blocks < unit_end; ++i) {
      const int query_head = head * group + i, before = i * p.q_blocks;
      const int64_t list = first_list + i;
      const int begin = next_begin, end = next_end;
      if (before + p.q_blocks < unit_end)
        next_begin = __ldg(offsets_of(i + 1)), next_end = __ldg(offsets_of(i + 1) + 1);
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
      for_queries(p.listing + list * p.q_blocks * p.slots, begin, end, max(0, unit_begin - before),
                  min(p.q_blocks, unit_end - before), send);
    }
    take();
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
    // Under way while the warp waits.
    const int* g_ids = listed_ids(p, item);
    const int number = __ldg(listed_number(p, item));
    int next_id = lane < p.slots ? __ldg(g_ids + lane) : -1;
    if (lane == 0) {
      wait_done(p.keys_done(work.unit), units.key_items(work.unit));
      fence_async_proxy_global();
    }
    __syncwarp();
    const int first_tile = units.first_tile(work.unit, work.head, work.block), count = min(number, p.slots);
    for (int first = 0; first < count; first += kWarpThreads) {
      const int keys = first + lane < count ? valid_keys(p, next_id) : 0, id = next_id;
      if (first + kWarpThreads + lane < count) next_id = __ldg(g_ids + first + kWarpThreads + lane);
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
    take();
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
  copier.take();
  for (int64_t place = copier.taken_place(); place < units.places(); place = copier.taken_place()) {
    Work work;
    if (!units.find(place, work)) {
      copier.take();
    } else if (work.for_keys) {
      copier.send_keys(work);
    } else {
      copier.send_queries(work);
    }
  }
  copier.stop();
}

}  // namespace dsa::block_sparse_attn_bwd
