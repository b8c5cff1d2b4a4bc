// Selects the template instance and the cluster size, and launches.
#include <algorithm>

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::mhc_pre_fwd {
namespace {

template <int kStreams, int kChunks>
const char* launch_instance(const Params& p, int ctas, cudaStream_t stream) {
  using S = Shape<kStreams>;
  constexpr auto kKernel = mhc_pre_fwd_kernel<S, kChunks>;
  constexpr int kBytes = sizeof(SharedStorage<S, kChunks>);
  static_assert(kBytes <= kMaxSharedBytes);
  CUtensorMap x_map, phi_map;
  const bool encoded =  // tokens as heads, streams as positions
      encode_head_tensor(&x_map,
                         {p.x, p.columns, p.tokens, 1, p.streams, 1, int64_t{p.streams} * p.columns, 0, p.columns, 0},
                         {.columns = kChunk, .heads = kTokens, .positions = kStreams});
  if (!encoded) return "no tensor map for x";
  const int row_bytes = p.columns * sizeof(float);  // phi's rows as heads, streams as positions, in bytes
  const bool phi_encoded = encode_head_tensor(
      &phi_map, {p.phi, row_bytes, S::kMixed, 1, p.streams, 1, int64_t{p.streams} * row_bytes, 0, row_bytes, 0},
      {.columns = kSwizzleRowBytes, .heads = S::kMixed, .positions = kStreams, .element_bytes = 1});
  if (!phi_encoded) return "no tensor map for phi";
  int clusters;
  const char* error = count_clusters<kKernel>(p.device, ctas, kThreads, kBytes, &clusters);
  if (error != nullptr) return error;
  clusters = std::min(clusters, (p.tokens - 1) / kTokens + 1);
  return launch_kernel<kKernel>(p.device, Grid(clusters * ctas, ctas), kThreads, kBytes, stream, p, x_map, phi_map,
                                ctas);
}

// The smallest cluster whose registers hold phi, and at least two CTAs: messages need a cluster.
template <int kStreams>
const char* launch_streams(const Params& p, cudaStream_t stream) {
  constexpr int kMost = kStreams == 2 ? 14 : 7;  // chunks per CTA
  const int chunks = p.columns / kChunk;
  int ctas = 2;
  while (ctas < 16 && (chunks + ctas - 1) / ctas > kMost) ctas *= 2;
  const int most = (chunks + ctas - 1) / ctas;
  if constexpr (kStreams == 2) {
    if (most <= 5) return launch_instance<2, 5>(p, ctas, stream);
    return most <= 8 ? launch_instance<2, 8>(p, ctas, stream) : launch_instance<2, 14>(p, ctas, stream);
  } else {
    if (most <= 2) return launch_instance<4, 2>(p, ctas, stream);
    if (most <= 5) return launch_instance<4, 5>(p, ctas, stream);
    return most <= 7 ? launch_instance<4, 7>(p, ctas, stream) : launch_instance<4, 8>(p, ctas, stream);
  }
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_streams<2>(p, s) : launch_streams<4>(p, s);
}

}  // namespace dsa::mhc_pre_fwd
