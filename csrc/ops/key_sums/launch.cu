// Rounds sums; sorts slots by key, and adds up their rows.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/key_sums/params.h"
#include "sm90/launch.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/scatter.cuh"

namespace dsa::key_sums {
namespace {

constexpr int kThreads = 256, kColumns = 8;  // of one thread

unsigned blocks_of(int64_t items, int per_block) { return unsigned((items + per_block - 1) / per_block); }

// One thread for each 8 columns of a key: rounds the sums and puts their columns in order.
__global__ void __launch_bounds__(kThreads) round_sums_kernel(const __grid_constant__ Params p, int64_t pieces) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  const int first = piece * kColumns % sm90::kScatterColumns;
  const float* g_sums = p.sums + piece * kColumns - first;
  const auto pair = [&](int i) {
    return sm90::pack_bf16(g_sums[sm90::summed_place(first + i)], g_sums[sm90::summed_place(first + i + 1)]);
  };
  static_cast<uint4*>(p.result)[piece] = {pair(0), pair(2), pair(4), pair(6)};
}

// One thread for each place between two sorted slots: the keys that begin there.
__global__ void __launch_bounds__(kThreads) key_starts_kernel(const __grid_constant__ Params p, int slots) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i > slots) return;
  const int64_t end = i < slots ? p.slot_keys[1][i] : p.keys;
  for (int64_t key = i > 0 ? int64_t{p.slot_keys[1][i - 1]} + 1 : 0; key <= end; ++key) p.key_starts[key] = i;
}

// One thread for each 8 columns of a key. Adds up the rows of a launch in the order of their slots, after the sums of
// earlier launches; the last rounds and puts the columns in order.
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ Params p, bool is_first, bool is_last) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (key >= p.keys) return;
  const unsigned begin = p.key_starts[key], end = p.key_starts[key + 1];
  if (begin == end && !is_first && !is_last) return;
  const int row_pieces = p.columns / kColumns, piece = threadIdx.x;
  float4* g_sums = reinterpret_cast<float4*>(p.sums + key * p.columns) + 2 * piece;
  float4 low = {}, high = {};
  if (!is_first) low = g_sums[0], high = g_sums[1];
  const uint4* g_pieces = static_cast<const uint4*>(p.rows) + piece;
  const auto add = [](float& a, float& b, uint32_t pair) {
    a += __uint_as_float(pair << 16);
    b += __uint_as_float(pair & 0xffff0000u);
  };
  for (int block = 0; block < p.blocks; ++block) {
#pragma unroll 8
    for (unsigned i = begin; i < end; ++i) {
      const int64_t row = p.slot_rows[1][i] + block * p.block_stride;
      const uint4 pairs = __ldcs(g_pieces + row * row_pieces);
      add(low.x, low.y, pairs.x), add(low.z, low.w, pairs.y);
      add(high.x, high.y, pairs.z), add(high.z, high.w, pairs.w);
    }
  }
  if (!is_last) {
    g_sums[0] = low, g_sums[1] = high;
    return;
  }
  const int place = piece * kColumns % sm90::kScatterColumns;
  uint32_t* g_key = static_cast<uint32_t*>(p.result) + (key * p.columns + piece * kColumns - place) / 2;
  g_key[sm90::stored_column(place) / 2] = sm90::pack_bf16(low.x, low.y);
  g_key[sm90::stored_column(place + 2) / 2] = sm90::pack_bf16(low.z, low.w);
  g_key[sm90::stored_column(place + 4) / 2] = sm90::pack_bf16(high.x, high.y);
  g_key[sm90::stored_column(place + 6) / 2] = sm90::pack_bf16(high.z, high.w);
}

cudaError_t sort(const Params& p, size_t& bytes, int slots, cudaStream_t stream) {
  const int key_bits = std::bit_width(static_cast<uint64_t>(p.keys));
  return cub::DeviceRadixSort::SortPairs(p.sort_space, bytes, p.slot_keys[0], p.slot_keys[1], p.slot_rows[0],
                                         p.slot_rows[1], slots, 0, key_bits, stream);
}

const char* clear(void* data, int64_t bytes, void* stream) {
  if (bytes == 0) return nullptr;
  const cudaError_t error = cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

int64_t sort_bytes(int64_t slots, int64_t keys) {
  Params p{};
  p.keys = keys;
  size_t bytes = 0;
  sort(p, bytes, static_cast<int>(slots), nullptr);
  return static_cast<int64_t>(bytes);
}

const char* clear_sums(const Params& p, void* stream) {
  return clear(p.sums, p.keys * p.columns * sizeof(float), stream);
}

const char* clear_result(const Params& p, void* stream) { return clear(p.result, p.keys * p.columns * 2, stream); }

const char* round_sums(const Params& p, void* stream) {
  const int64_t pieces = p.keys * p.columns / kColumns;
  if (pieces == 0) return nullptr;
  return sm90::launch_kernel<round_sums_kernel>(p.device, blocks_of(pieces, kThreads), kThreads, 0,
                                                static_cast<cudaStream_t>(stream), p, pieces);
}

const char* sum_rows(const Params& p, int slots, bool is_first, bool is_last, void* s) {
  if (p.keys == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(s);
  size_t bytes = p.sort_bytes;
  const cudaError_t sorted = sort(p, bytes, slots, stream);
  if (sorted != cudaSuccess) return cudaGetErrorString(sorted);
  const char* error =
      sm90::launch_kernel<key_starts_kernel>(p.device, slots / kThreads + 1, kThreads, 0, stream, p, slots);
  if (error != nullptr) return error;
  const int row_pieces = p.columns / kColumns, keys_of_block = std::max(1, kThreads / row_pieces);
  return sm90::launch_kernel<sum_rows_kernel>(p.device, blocks_of(p.keys, keys_of_block),
                                              dim3(row_pieces, keys_of_block), 0, stream, p, is_first, is_last);
}

}  // namespace dsa::key_sums
