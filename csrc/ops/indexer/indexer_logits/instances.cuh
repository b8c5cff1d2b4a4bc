// Selects the template instance for a shape and launches it.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::indexer_logits {

// The instances of a kernel: `launch.template operator()<Element, kRowBytes, kHeads>(q_map, k_map)` launches one, and
// returns null, or a text that says what failed.
template <class Element, int kRowBytes, int kHeads, class Launch>
const char* launch_config(const Params& p, const Launch& launch) {
  constexpr Config kC{kRowBytes, kHeads};
  constexpr int kElementBytes = sizeof(Element), kChunkColumns = kC.chunk_bytes() / kElementBytes;
  CUtensorMap q_map, k_map;
  if (!encode_head_tensor(&q_map, {p.q, p.dim, p.heads, 1, p.seq, 1, p.q_stride_h, 0, p.q_stride_s, 0},
                          {kChunkColumns, kHeads, kC.queries(), kElementBytes})) {
    return "no tensor map for q";
  }
  // Of a sample a part is one position.
  const bool encoded = p.sample_period == 0
                           ? encode_head_tensor(&k_map, {p.k, p.dim, 1, 1, p.seq_kv, 1, 0, 0, p.k_stride, 0},
                                                {kChunkColumns, 1, kTileKeys, kElementBytes})
                           : encode_head_tensor(&k_map,
                                                {p.k, p.dim, kPartKeys, 1, p.seq_kv / kPartKeys, 1, p.k_stride, 0,
                                                 p.k_stride * p.sample_period, 0},
                                                {kChunkColumns, kPartKeys, kTileParts, kElementBytes});
  if (!encoded) return "no tensor map for k";
  return launch.template operator()<Element, kRowBytes, kHeads>(q_map, k_map);
}

template <class Element, int kRowBytes, class Launch>
const char* launch_heads(const Params& p, const Launch& launch) {
  switch (p.heads) {
    case 8:
      return launch_config<Element, kRowBytes, 8>(p, launch);
    case 16:
      return launch_config<Element, kRowBytes, 16>(p, launch);
    case 32:
      return launch_config<Element, kRowBytes, 32>(p, launch);
    default:
      return launch_config<Element, kRowBytes, 64>(p, launch);
  }
}

template <class Element, class Launch>
const char* launch_instance(const Params& p, const Launch& launch) {
  constexpr int kBytes = sizeof(Element);
  return p.dim == 128 ? launch_heads<Element, 128 * kBytes>(p, launch) : launch_heads<Element, 64 * kBytes>(p, launch);
}

template <class Element>
const char* launch_element(const Params& p, void* stream) {
  return launch_instance<Element>(
      p, [&]<class E, int kRowBytes, int kHeads>(const CUtensorMap& q_map, const CUtensorMap& k_map) {
        constexpr int kSharedBytes = sizeof(SharedStorage<E, Config{kRowBytes, kHeads}>);
        static_assert(kSharedBytes <= sm90::kMaxSharedBytes);
        return launch_kernel<indexer_logits_kernel<E, kRowBytes, kHeads>>(
            p.device, unsigned(p.num_sms), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), p, q_map, k_map);
      });
}

}  // namespace dsa::indexer_logits
