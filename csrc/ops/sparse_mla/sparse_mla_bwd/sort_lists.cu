// Sorts the list of ids of each query and group, by CUB's radix sort of a block.
#include <cstdint>
#include <cub/block/block_radix_sort.cuh>

#include "sm90/launch.h"
#include "sort_lists.h"
#include "tiles/visibility.cuh"

namespace dsa::sparse_mla_bwd {
namespace {

using sparse_mla::Problem;

constexpr int kSortThreads = 256;
constexpr int kDigitBits = 5;  // 4 passes for 2^15 to 2^20 - 1 keys

// One block per list, `kSlots` slots per thread. A list that ascends already is only copied.
template <int kSlots>
__global__ void __launch_bounds__(kSortThreads)
    sort_lists_kernel(const __grid_constant__ Problem p, int* __restrict__ g_sorted) {
  using Sort = cub::BlockRadixSort<unsigned, kSortThreads, kSlots, cub::NullType, kDigitBits>;
  __shared__ typename Sort::TempStorage s_sort;
  const int group = blockIdx.x % p.groups, query = blockIdx.x / p.groups, b = query / p.seq_q, s = query % p.seq_q;
  // A thread's slots are kSortThreads apart; here they are counted from its first one.
  const int first = threadIdx.x, left = tiles::used_slots(p, b, s) - first;
  const tiles::VisibleIds ids = tiles::visible_ids(p, b, s);
  const int* g_ids = p.indices + b * p.indices_stride_b + s * p.indices_stride_s + group * p.indices_stride_g + first;
  const auto key_of = [&](int slot) {
    const int id = slot < left ? __ldg(g_ids + slot) : -1;
    return static_cast<unsigned>(ids.has(id) ? id : p.seq_kv);
  };

  unsigned keys[kSlots];
  bool ascends = true;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    keys[i] = key_of(i * kSortThreads);
    ascends &= keys[i] <= key_of(i * kSortThreads + 1);
  }
  // The sort expects a thread's slots to be neighbors. Since there are no values, their order before does not matter.
  if (!__syncthreads_and(ascends)) Sort(s_sort).SortBlockedToStriped(keys, 0, 32 - __clz(p.seq_kv));

  int* g_list = g_sorted + static_cast<int64_t>(blockIdx.x) * p.topk + first;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (i * kSortThreads < left) g_list[i * kSortThreads] = static_cast<int>(keys[i]);
  }
}

// Launches the kernel with the fewest slots per thread that hold a list, at least kSlots.
template <int kSlots>
const char* launch_sort(const Problem& p, int* sorted, cudaStream_t stream) {
  if constexpr (kSlots * kSortThreads < kMaxSortedSlots) {
    if (p.topk > kSlots * kSortThreads) return launch_sort<2 * kSlots>(p, sorted, stream);
  }
  const unsigned lists = unsigned(p.batch) * p.seq_q * p.groups;
  return sm90::launch_kernel<sort_lists_kernel<kSlots>>(p.device, lists, kSortThreads, 0, stream, p, sorted);
}

}  // namespace

const char* sort_lists(const Problem& p, int* sorted, void* stream) {
  return launch_sort<2>(p, sorted, static_cast<cudaStream_t>(stream));
}

}  // namespace dsa::sparse_mla_bwd
