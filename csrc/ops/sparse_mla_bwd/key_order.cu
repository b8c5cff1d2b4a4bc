// Which slots add to a key: an inverse of `indices`, always in the same order.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "config.h"
#include "params.h"
#include "sm90/gather.cuh"
#include "sm90/launch.h"

namespace dsa::sparse_mla_bwd {
namespace {

constexpr int kSlotThreads = 256;

// One thread a slot. What is not visible gets a key behind all others.
__global__ void __launch_bounds__(kSlotThreads) list_slots_kernel(const __grid_constant__ Params p, int slots) {
  const int i = blockIdx.x * kSlotThreads + threadIdx.x;
  if (i >= slots) return;
  const int blocks = head_blocks(p.heads, p.groups), slot = i % p.topk, row = i / p.topk, group = row % p.groups;
  const int query = p.first_item / (p.groups * blocks) + row / p.groups, b = query / p.seq_q, s = query % p.seq_q;
  const int used = sm90::used_slots(
      p.topk, p.topk_length ? p.topk_length + b * p.topk_length_stride_b + s * p.topk_length_stride_s : nullptr);
  const int id = p.indices[b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g + slot];
  const int id_end = sm90::visible_end(p.seq_kv, p.causal, p.q_start, p.positions_per_key, s);
  const bool visible = slot < used && sm90::is_visible(id, id_end);
  p.slot_keys[0][i] = (unsigned(b) * p.seq_kv + (visible ? id : 0)) * p.groups + group;
  if (!visible) p.slot_keys[0][i] = unsigned(p.batch) * p.seq_kv * p.groups;
  p.slot_rows[0][i] = unsigned(row) * blocks * p.topk + slot;
}

// One thread for each place between two sorted slots: the keys that begin there.
__global__ void __launch_bounds__(kSlotThreads)
    key_starts_kernel(const __grid_constant__ Params p, int slots, int64_t keys) {
  const int i = blockIdx.x * kSlotThreads + threadIdx.x;
  if (i > slots) return;
  const int64_t end = i < slots ? p.slot_keys[1][i] : keys;
  for (int64_t key = i > 0 ? int64_t{p.slot_keys[1][i - 1]} + 1 : 0; key <= end; ++key) p.key_starts[key] = i;
}

cudaError_t sort(void* space, size_t& bytes, const Params& p, int slots, int64_t keys, cudaStream_t stream) {
  const int key_bits = std::bit_width(static_cast<uint64_t>(keys));
  return cub::DeviceRadixSort::SortPairs(space, bytes, p.slot_keys[0], p.slot_keys[1], p.slot_rows[0], p.slot_rows[1],
                                         slots, 0, key_bits, stream);
}

}  // namespace

int64_t sort_bytes(int64_t slots, int64_t keys) {
  size_t bytes = 0;
  sort(nullptr, bytes, Params{}, static_cast<int>(slots), keys, nullptr);
  return static_cast<int64_t>(bytes);
}

const char* sort_slots(const Params& p, int64_t queries, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const int slots = static_cast<int>(queries * p.groups * p.topk);
  const int64_t keys = int64_t{p.batch} * p.seq_kv * p.groups;
  const char* error = sm90::launch_kernel<list_slots_kernel>(p.device, (slots + kSlotThreads - 1) / kSlotThreads,
                                                             kSlotThreads, 0, s, p, slots);
  if (error != nullptr) return error;
  size_t bytes = p.sort_bytes;
  const cudaError_t sorted = sort(p.sort_space, bytes, p, slots, keys, s);
  if (sorted != cudaSuccess) return cudaGetErrorString(sorted);
  return sm90::launch_kernel<key_starts_kernel>(p.device, slots / kSlotThreads + 1, kSlotThreads, 0, s, p, slots, keys);
}

}  // namespace dsa::sparse_mla_bwd
