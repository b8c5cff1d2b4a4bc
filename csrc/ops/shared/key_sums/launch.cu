// Kernels that round the fp32 sums; or sort slots by key and add up their rows.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/shared/key_sums/params.h"
#include "sm90/launch.h"
#include "sm90/matrix_copy.cuh"
#include "sm90/programmatic.cuh"
#include "tiles/scatter.cuh"

namespace dsa::key_sums {
namespace {

constexpr int kThreads = 256, kColumns = 8;  // per thread

unsigned blocks_of(int64_t items, int per_block) { return unsigned((items + per_block - 1) / per_block); }

// One thread per 8 columns of a key: rounds the sums and restores the column order.
__global__ void __launch_bounds__(kThreads) round_sums_kernel(const __grid_constant__ Params p, int64_t pieces) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  const int first = piece * kColumns % tiles::kScatterColumns;
  const float* g_sums = p.sums + piece * kColumns - first;
  const auto pair = [&](int i) {
    return sm90::pack_bf16(g_sums[tiles::summed_place(first + i)], g_sums[tiles::summed_place(first + i + 1)]);
  };
  static_cast<uint4*>(p.result)[piece] = {pair(0), pair(2), pair(4), pair(6)};
}

constexpr int kPlaces = 4;  // per thread

// For each boundary between two sorted slots, writes key_starts of the keys that begin there. Where there are many such
// keys, all threads of the block share them. Also clears the counters of parts.
__global__ void __launch_bounds__(kThreads)
    key_starts_kernel(const __grid_constant__ Params p, unsigned slots, unsigned counters) {
  constexpr unsigned kFew = 32;
  struct Gap {
    unsigned first, end, place;
  };
  __shared__ Gap s_gaps[kPlaces * kThreads];
  __shared__ int s_count;
  if (threadIdx.x == 0) s_count = 0;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < counters; i += gridDim.x * kThreads) p.parts_done[i] = 0;
  Gap gaps[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const unsigned place = (blockIdx.x * kPlaces + i) * kThreads + threadIdx.x;
    const unsigned first = place > 0 && place <= slots ? __ldg(p.slot_keys[1] + place - 1) + 1 : 0;
    const unsigned last = place < slots ? __ldg(p.slot_keys[1] + place) : unsigned(p.keys);
    gaps[i] = {first, place <= slots ? last + 1 : 0, place};
  }
  bool are_many = false;
#pragma unroll
  for (const auto& [first, end, place] : gaps) {
    if (first + kFew < end) {
      are_many = true;
    } else {
      for (unsigned key = first; key < end; ++key) p.key_starts[key] = place;
    }
  }
  if (!__syncthreads_or(are_many)) return;
#pragma unroll
  for (const Gap& gap : gaps) {
    if (gap.first + kFew < gap.end) s_gaps[atomicAdd(&s_count, 1)] = gap;
  }
  __syncthreads();
  for (int i = 0; i < s_count; ++i) {
    const auto [first, end, place] = s_gaps[i];
    for (unsigned key = first + threadIdx.x; key < end; key += kThreads) p.key_starts[key] = place;
  }
}

// Sums of 8 columns, in the order of store_rows.
struct Sums {
  float4 low, high;

  // Adds the rows of sorted slots [begin, end), in order.
  __device__ __forceinline__ void add_rows(const Params& p, unsigned begin, unsigned end, int piece) {
    const int row_pieces = p.columns / kColumns;
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
  }
  __device__ __forceinline__ void add(const float4* g_sums) {
    const float4 a = __ldcg(g_sums), b = __ldcg(g_sums + 1);
    low.x += a.x, low.y += a.y, low.z += a.z, low.w += a.w;
    high.x += b.x, high.y += b.y, high.z += b.z, high.w += b.w;
  }
  __device__ __forceinline__ void store(float4* g_sums) const { g_sums[0] = low, g_sums[1] = high; }
};

__device__ __forceinline__ float4* sums_of(float* g_rows, int64_t row, int columns, int piece) {
  return reinterpret_cast<float4*>(g_rows + row * columns) + 2 * piece;
}

// Adds the rows of a key, which add(sums) adds up, to the sums of earlier launches; the last launch rounds and restores
// the column order.
template <class Add>
__device__ __forceinline__ void sum_key(const Params& p, int64_t key, int piece, bool is_first, bool is_last,
                                        const Add& add) {
  float4* g_sums = sums_of(p.sums, key, p.columns, piece);
  Sums sums{};
  if (!is_first) sums = {g_sums[0], g_sums[1]};
  add(sums);
  if (!is_last) return sums.store(g_sums);
  const int place = piece * kColumns % tiles::kScatterColumns;
  uint32_t* g_key = static_cast<uint32_t*>(p.result) + (key * p.columns + piece * kColumns - place) / 2;
  g_key[tiles::stored_column(place) / 2] = sm90::pack_bf16(sums.low.x, sums.low.y);
  g_key[tiles::stored_column(place + 2) / 2] = sm90::pack_bf16(sums.low.z, sums.low.w);
  g_key[tiles::stored_column(place + 4) / 2] = sm90::pack_bf16(sums.high.x, sums.high.y);
  g_key[tiles::stored_column(place + 6) / 2] = sm90::pack_bf16(sums.high.z, sums.high.w);
}

// Whether a key has so many rows that they are added up in parts.
__device__ __forceinline__ bool is_cut(unsigned begin, unsigned end) { return end - begin >= 2 * kSegment; }

// One thread per 8 columns of a key that is not cut: adds up the rows of a launch in the order of their slots.
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ Params p, bool is_first, bool is_last) {
  sm90::launch_dependents();
  const int64_t key = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (key >= p.keys) return;
  const unsigned begin = p.key_starts[key], end = p.key_starts[key + 1];
  if (is_cut(begin, end) || (begin == end && !is_first && !is_last)) return;
  sum_key(p, key, threadIdx.x, is_first, is_last, [&](Sums& sums) { sums.add_rows(p, begin, end, threadIdx.x); });
}

// A cut key's slots in parts of kSegment, counted from its first slot, so that its sum does not depend on other keys.
// In each segment of all sorted slots at most two parts begin: one of a key that began before, and another key's first.
struct Parts {
  unsigned begin, end;  // the key's slots

  __device__ __forceinline__ unsigned count() const { return (end - begin + kSegment - 1) / kSegment; }
  __device__ __forceinline__ unsigned first_slot(unsigned part) const { return begin + part * kSegment; }
  // Index of a part's sums; the first part's index is also that of the key's counter.
  __device__ __forceinline__ unsigned place(unsigned part) const {
    return first_slot(part) / kSegment * 2 + (part == 0 && begin % kSegment != 0);
  }
};

// One thread per 8 columns of a part of a cut key; the last part to finish adds up all, in order. Programmatic
// dependent launch (PDL): starts when the last blocks of sum_rows_kernel run.
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const __grid_constant__ Params p, unsigned slots, bool is_first, bool is_last) {
  sm90::wait_for_preceding_kernel();
  const unsigned place = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned segment_begin = place / 2 * kSegment, segment_end = min(segment_begin + kSegment, slots);
  if (segment_begin >= slots) return;
  const unsigned key = p.slot_keys[1][place % 2 != 0 ? segment_end - 1 : segment_begin];
  if (key == p.keys) return;
  const Parts parts{p.key_starts[key], p.key_starts[key + 1]};
  if (!is_cut(parts.begin, parts.end)) return;
  const unsigned part = parts.begin < segment_begin ? (segment_begin - parts.begin + kSegment - 1) / kSegment : 0;
  if (part >= parts.count() || parts.place(part) != place) return;
  const unsigned begin = parts.first_slot(part);
  const int piece = threadIdx.x;
  Sums sums{};
  sums.add_rows(p, begin, min(begin + kSegment, parts.end), piece);
  sums.store(sums_of(p.part_sums, place, p.columns, piece));

  __threadfence();
  if (atomicAdd(p.parts_done + parts.place(0) * blockDim.x + piece, 1) + 1 < parts.count()) return;
  __threadfence();
  sum_key(p, key, piece, is_first, is_last, [&](Sums& all) {
    for (unsigned i = 0; i < parts.count(); ++i) all.add(sums_of(p.part_sums, parts.place(i), p.columns, piece));
  });
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
  const int row_pieces = p.columns / kColumns, rows_of_block = std::max(1, kThreads / row_pieces);
  const unsigned parts = max_parts(slots);
  const char* error = sm90::launch_kernel<key_starts_kernel>(
      p.device, blocks_of(slots + 1, kPlaces * kThreads), kThreads, 0, stream, p, unsigned(slots), parts * row_pieces);
  if (error != nullptr) return error;
  const dim3 block(row_pieces, rows_of_block);
  error = sm90::launch_kernel<sum_rows_kernel>(p.device, blocks_of(p.keys, rows_of_block), block, 0, stream, p,
                                               is_first, is_last);
  if (error != nullptr || parts == 0) return error;
  const sm90::Grid grid(blocks_of(parts, rows_of_block), 1, true);
  return sm90::launch_kernel<sum_parts_kernel>(p.device, grid, block, 0, stream, p, slots, is_first, is_last);
}

}  // namespace dsa::key_sums
