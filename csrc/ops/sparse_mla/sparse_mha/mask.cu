// Masks from lists of keys. A CTA has one block of queries and the keys of one word of `tiles`; each warp has rows in
// turn. A row's keys are marked as bytes first, since lists name neighboring keys in neighboring lanes: their bits
// would have to be set one after another.
#include "ops/sparse_mla/sparse_mha/mask.h"
#include "ops/sparse_mla/sparse_mha/visible_keys.cuh"
#include "sm90/launch.h"
#include "sm90/warpgroup.cuh"

namespace dsa::sparse_mha {
namespace {

using namespace dsa::sm90;

constexpr int kWarps = 16, kThreads = kWarps * kWarpThreads;
constexpr int kWords = 128, kKeys = kWords * 32;  // of a CTA
constexpr int kPad = 1;                           // so that a column of words is in different banks
static_assert(kKeys / kBlock == 32);

struct Storage {
  uint4 marks[kWarps][kKeys / sizeof(uint4)];  // a byte for each key of a row
  uint32_t bits[kBlock][kWords + kPad];
};

// Four marks, each 0 or 1, as bits.
__device__ __forceinline__ uint32_t bits_of_marks(uint32_t marks) { return marks * 0x01020408u >> 24 & 15; }

// Word `word` of the bits of a row's marks.
__device__ __forceinline__ uint32_t word_of_marks(const uint4* marks, int word) {
  uint32_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 sixteen = marks[word * 2 + half];
    const uint32_t low = bits_of_marks(sixteen.x) | bits_of_marks(sixteen.y) << 4;
    const uint32_t high = bits_of_marks(sixteen.z) | bits_of_marks(sixteen.w) << 4;
    bits |= (low | high << 8) << half * 16;
  }
  return bits;
}

// Marks the keys from `first` on that query `s` of sequence `b` lists and sees. Run by one warp.
__device__ __forceinline__ void mark_row(const Lists& p, int b, int s, int first, uint4* marks) {
  const int lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int i = lane; i < kKeys / int(sizeof(uint4)); i += kWarpThreads) marks[i] = {};
  __syncwarp();
  if (s < p.seq_q) {
    const tiles::VisibleIds visible = visible_keys(p, b, s);
    const int* g_ids = p.ids + b * p.ids_stride_b + s * p.ids_stride_s;
    auto* bytes = reinterpret_cast<uint8_t*>(marks);
#pragma unroll 8
    for (int i = lane; i < p.topk; i += kWarpThreads) {
      const int id = __ldg(g_ids + i);
      if (visible.has(id) && static_cast<unsigned>(id - first) < unsigned{kKeys}) bytes[id - first] = 1;
    }
  }
  __syncwarp();
}

// The words of 32 keys' queries, from the CTA's bits. Run by one warp: each lane has a key.
__device__ __forceinline__ uint4 queries_of_key(const Storage& shared, int word) {
  const int lane = threadIdx.x % kWarpThreads;
  uint32_t found[4] = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const uint32_t keys = shared.bits[part * kWarpThreads + lane][word];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t queries = __ballot_sync(~0u, keys >> i & 1);
      if (lane == i) found[part] = queries;
    }
  }
  return {found[0], found[1], found[2], found[3]};
}

__global__ void __launch_bounds__(kThreads, 1)
    mask_kernel(const __grid_constant__ Mask mask, const __grid_constant__ Lists p) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(shared_bytes);
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int block = blockIdx.x / mask.tile_words, part = blockIdx.x % mask.tile_words;  // of all sequences
  const int b = block / mask.q_blocks, first_query = block % mask.q_blocks * kBlock;
  const int first_word = part * kWords, words = min(kWords, mask.kv_blocks * (kBlock / 32) - first_word);
  for (int row = warp; row < kBlock; row += kWarps) {
    mark_row(p, b, first_query + row, first_word * 32, shared.marks[warp]);
    uint32_t* g_row = mask.keys + (int64_t{block} * kBlock + row) * mask.kv_blocks * (kBlock / 32) + first_word;
#pragma unroll
    for (int i = 0; i < kWords / kWarpThreads; ++i) {
      const int word = i * kWarpThreads + lane;
      const uint32_t bits = word_of_marks(shared.marks[warp], word);
      shared.bits[row][word] = bits;
      if (mask.keys != nullptr && word < words) g_row[word] = bits;
    }
    __syncwarp();
  }
  __syncthreads();
  if (mask.queries != nullptr) {
    for (int word = warp; word < words; word += kWarps) {
      const int64_t key = (int64_t{b} * mask.kv_blocks * kBlock) + (first_word + word) * 32 + lane;
      auto* g_row = reinterpret_cast<uint4*>(mask.queries) + key * mask.q_blocks + block % mask.q_blocks;
      *g_row = queries_of_key(shared, word);
    }
  }
  if (warp > 0) return;
  uint32_t any = 0;  // of the lane's block of keys
  for (int row = 0; row < kBlock; ++row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) any |= shared.bits[row][lane * 4 + i];
  }
  const uint32_t listed = __ballot_sync(~0u, any != 0);
  if (lane == 0) mask.tiles[blockIdx.x] = listed;
}

}  // namespace

const char* launch_mask(const Mask& mask, const Lists& lists, int device, void* stream) {
  const auto ctas = unsigned(lists.batch * mask.q_blocks * mask.tile_words);
  return launch_kernel<mask_kernel>(device, ctas, kThreads, int{sizeof(Storage)}, static_cast<cudaStream_t>(stream),
                                    mask, lists);
}

}  // namespace dsa::sparse_mha
