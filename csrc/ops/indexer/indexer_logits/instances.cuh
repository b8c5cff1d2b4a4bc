// Selects the template instance for a shape and launches it.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::indexer_logits {

template <class Element, int kRowBytes, int kHeads, bool kAbove>
const char* launch_config(const Params& p, cudaStream_t stream) {
  constexpr Config kC{kRowBytes, kHeads, kAbove};
  constexpr int kElementBytes = sizeof(Element), kChunkColumns = kC.chunk_bytes() / kElementBytes;
  CUtensorMap q_map, k_map;
  if (!encode_head_tensor(&q_map, {p.q, p.dim, p.heads, 1, p.seq, 1, p.q_stride_h, 0, p.q_stride_s, 0},
                          {kChunkColumns, kHeads, kC.queries(), kElementBytes})) {
    return "no tensor map for q";
  }
  if (!encode_head_tensor(&k_map, {p.k, p.dim, 1, 1, p.seq_kv, 1, 0, 0, p.k_stride, 0},
                          {kChunkColumns, 1, kTileKeys, kElementBytes})) {
    return "no tensor map for k";
  }
  constexpr int kBytes = sizeof(SharedStorage<Element, kC>);
  static_assert(kBytes <= 227 * 1024);
  const Grid grid(unsigned(p.num_sms), 1, /*programmatic=*/true);
  return launch_kernel<indexer_logits_kernel<Element, kRowBytes, kHeads, kAbove>>(
      p.device, grid, kThreads, kBytes, stream, KernelParams(p), q_map, k_map);
}

template <class Element, int kRowBytes, bool kAbove>
const char* launch_heads(const Params& p, cudaStream_t stream) {
  switch (p.heads) {
    case 8:
      if constexpr (kAbove)
        return "no lists of logits with 8 heads";
      else
        return launch_config<Element, kRowBytes, 8, kAbove>(p, stream);
    case 16:
      return launch_config<Element, kRowBytes, 16, kAbove>(p, stream);
    case 32:
      return launch_config<Element, kRowBytes, 32, kAbove>(p, stream);
    default:
      return launch_config<Element, kRowBytes, 64, kAbove>(p, stream);
  }
}

template <class Element, bool kAbove>
const char* launch_element(const Params& p, void* stream) {
  constexpr int kBytes = sizeof(Element);
  const auto s = static_cast<cudaStream_t>(stream);
  return p.dim == 128 ? launch_heads<Element, 128 * kBytes, kAbove>(p, s)
                      : launch_heads<Element, 64 * kBytes, kAbove>(p, s);
}

}  // namespace dsa::indexer_logits
