// Chooses the instance and the cluster, and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::mhc_pre_fwd {
namespace {

template <int kStreams, int kChunks>
const char* launch_instance(const Params& p, int ctas, cudaStream_t stream) {
  CUtensorMap x_map;
  const bool encoded = encode_head_tensor(
      &x_map, {p.x, p.columns, p.streams, 1, p.tokens, 1, p.columns, 0, int64_t{p.streams} * p.columns, 0},
      {.columns = kChunk, .heads = 1, .positions = kTokens});
  if (!encoded) return "no tensor map for x";
  constexpr int kBytes = sizeof(SharedStorage<kStreams, kChunks>);
  static_assert(kBytes <= kMaxSharedBytes);
  const unsigned clusters = p.num_sms / ctas;
  return launch_kernel<mhc_pre_fwd_kernel<kStreams, kChunks>>(
      p.device, Grid(clusters * ctas, ctas), Shape<kStreams, kChunks>::kThreads, kBytes, stream, p, x_map, ctas);
}

// As few CTAs in a cluster as have registers for phi.
template <int kStreams>
const char* launch_streams(const Params& p, cudaStream_t stream) {
  constexpr int kMost = 7;
  const int chunks = p.columns / kChunk;
  int ctas = 1;
  while (ctas < 16 && (chunks + ctas - 1) / ctas > kMost) ctas *= 2;
  const int most = (chunks + ctas - 1) / ctas;
  if (most <= 2) return launch_instance<kStreams, 2>(p, ctas, stream);
  return most <= 5 ? launch_instance<kStreams, 5>(p, ctas, stream) : launch_instance<kStreams, 7>(p, ctas, stream);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_streams<2>(p, s) : launch_streams<4>(p, s);
}

}  // namespace dsa::mhc_pre_fwd
