// Which CTA does what, in which order, and the tiles of an item.
#pragma once

#include "params.h"

namespace dsa::sparse_mha_fwd {

using namespace dsa::sparse_mha;

// A query block of one head.
struct Item {
  int block, head, batch;

  // First query of the block in [batch, q_blocks * kBlock].
  __device__ __forceinline__ int64_t row(const Params& p) const {
    return (static_cast<int64_t>(batch) * p.mask.q_blocks + block) * kBlock;
  }
};

// Query blocks come in pairs, a late one and an early one, which have about equally many tiles together if the mask is
// causal. Each of the first CTAs, one per SM, takes as many pairs as the others, a head's pairs at about the same time,
// so that its keys and values stay in L2. The rest is a CTA per item, late blocks first, which the hardware starts as
// those finish.
struct Schedule {
  int workers, rounds;  // of the first CTAs
  int pairs;            // of a head
  int rest;             // pairs

  explicit Schedule(const Params& p) : pairs((p.mask.q_blocks + 1) / 2) {
    const int all = pairs * p.heads * p.batch;
    rounds = all / p.num_sms > 1 ? all / p.num_sms - 1 : 0;
    workers = rounds > 0 ? p.num_sms : 0;
    rest = all - workers * rounds;
  }
  unsigned ctas() const { return workers + 2 * rest; }
};

// Item `index` of the rest: the late blocks of its pairs, then the early ones. Of the first head there, only the pairs
// from `from` on are left.
__device__ __forceinline__ Item item_of_rest(const Params& p, const Schedule& s, int index) {
  const bool is_late = index < s.rest;
  const int done = s.workers * s.rounds, from = done % s.pairs;
  const int whole = p.heads * p.batch - done / s.pairs - 1;  // heads of which all pairs are left
  int at = is_late ? index : 2 * s.rest - 1 - index, early, row = done / s.pairs;
  if (at < from * whole) {
    early = at / whole;
    row += 1 + at % whole;
  } else {
    at -= from * whole;
    early = from + at / (whole + 1);
    row += at % (whole + 1);
  }
  return {is_late ? p.mask.q_blocks - 1 - early : early, row % p.heads, row / p.heads};
}

// Calls use(item) for each item of this CTA.
template <class Use>
__device__ __forceinline__ void for_items(const Params& p, const Schedule& s, const Use& use) {
  const int cta = blockIdx.x;
  const bool is_worker = cta < s.workers;
#pragma unroll 1
  for (int i = 0; i < (is_worker ? 2 * s.rounds : 1); ++i) {
    const bool is_early = is_worker ? i % 2 : cta - s.workers >= s.rest;
    Item item;
    if (is_worker) {
      const int pair = i / 2 * s.workers + cta, row = pair / s.pairs, early = pair % s.pairs;
      item = {is_early ? early : p.mask.q_blocks - 1 - early, row % p.heads, row / p.heads};
    } else {
      item = item_of_rest(p, s, cta - s.workers);
    }
    if (is_early && item.block * 2 + 1 == p.mask.q_blocks) continue;  // the middle block has no partner
    use(item);
  }
}

__device__ __forceinline__ const uint32_t* tile_words(const Params& p, const Item& item) {
  return p.mask.tiles + (static_cast<int64_t>(item.batch) * p.mask.q_blocks + item.block) * p.mask.tile_words;
}

// Calls use(tile) for each key block that has bits.
template <class Use>
__device__ __forceinline__ void for_tiles(const Params& p, const Item& item, const Use& use) {
  const uint32_t* g_words = tile_words(p, item);
  for (int w = 0; w < p.mask.tile_words; ++w) {
    for (uint32_t left = __ldg(g_words + w); left != 0; left &= left - 1) use(w * 32 + __ffs(left) - 1);
  }
}

// The number of key blocks that have bits. Run by one warp.
__device__ __forceinline__ int count_tiles(const Params& p, const Item& item, int lane) {
  const uint32_t* g_words = tile_words(p, item);
  int count = 0;
#pragma unroll 1
  for (int w = lane; w < p.mask.tile_words; w += 32) count += __popc(__ldg(g_words + w));
  return __reduce_add_sync(~0u, count);
}

}  // namespace dsa::sparse_mha_fwd
