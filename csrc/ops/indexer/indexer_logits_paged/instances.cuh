// Selects the template instance for a shape and launches it.
#pragma once

#include "kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::indexer_logits_paged {

template <class Element, int kRowBytes, int kHeads, int kPassRows, int kMaxPasses>
const char* launch_config(const Params& p, cudaStream_t stream) {
  constexpr Config kC{kRowBytes, kHeads, kPassRows, kMaxPasses};
  static_assert(kC.stages() >= 2 * kC.math_warpgroups());
  static_assert(!kC.moves_registers() ||
                kMathRegisters * kC.math_threads() + kSpareRegisters * 128 <= kC.start_registers() * kC.threads());
  constexpr int kElementBytes = sizeof(Element), kChunkColumns = kC.chunk_bytes() / kElementBytes;
  CUtensorMap q_map, k_map;
  if (!encode_head_tensor(&q_map,
                          {p.q, p.dim, p.heads, 1, p.queries, p.batch, p.q_stride_h, 0, p.q_stride_n, p.q_stride_b},
                          {kChunkColumns, kHeads, kC.pass_queries(), kElementBytes})) {
    return "no tensor map for q";
  }
  if (p.max_keys == 0) {
    k_map = q_map;  // never used
  } else if (!encode_head_tensor(
                 &k_map, {p.k_cache, p.dim, p.page, 1, p.blocks, 1, p.cache_stride_key, 0, p.cache_stride_block, 0},
                 {kChunkColumns, kTileKeys, 1, kElementBytes})) {
    return "no tensor map for k_cache";
  }
  static_assert(sizeof(SharedStorage<Element, kC>) <= kMaxSharedBytes);
  const Grid grid(unsigned(p.num_sms), 1, /*programmatic=*/true);
  // With all shared memory of an SM: of a kernel that starts early, two CTAs would gather on one SM if it had room.
  return launch_kernel<indexer_logits_paged_kernel<Element, kRowBytes, kHeads, kPassRows, kMaxPasses>>(
      p.device, grid, kC.threads(), kMaxSharedBytes, stream, KernelParams(p), q_map, k_map);
}

template <class Element, int kRowBytes, int kHeads>
const char* launch_passes(const Params& p, cudaStream_t stream) {
  constexpr int kMostRows = kMaxQueries * kHeads;
  const int rows = p.queries * kHeads;
  if constexpr (kMostRows > 128) {
    if (rows > 128) return launch_config<Element, kRowBytes, kHeads, 128, (kMostRows + 127) / 128>(p, stream);
  }
  if constexpr (kMostRows > 64) {
    if (rows > 64) return launch_config<Element, kRowBytes, kHeads, 128, 1>(p, stream);
  }
  return launch_config<Element, kRowBytes, kHeads, 64, 1>(p, stream);
}

template <class Element, int kRowBytes>
const char* launch_heads(const Params& p, cudaStream_t stream) {
  switch (p.heads) {
    case 8:
      return launch_passes<Element, kRowBytes, 8>(p, stream);
    case 16:
      return launch_passes<Element, kRowBytes, 16>(p, stream);
    case 32:
      return launch_passes<Element, kRowBytes, 32>(p, stream);
    default:
      return launch_passes<Element, kRowBytes, 64>(p, stream);
  }
}

template <class Element>
const char* launch_element(const Params& p, void* stream) {
  constexpr int kBytes = sizeof(Element);
  const auto s = static_cast<cudaStream_t>(stream);
  return p.dim == 128 ? launch_heads<Element, 128 * kBytes>(p, s) : launch_heads<Element, 64 * kBytes>(p, s);
}

}  // namespace dsa::indexer_logits_paged
