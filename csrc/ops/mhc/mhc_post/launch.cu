// Selects the template instances and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::mhc_post {
namespace {

template <int kStreams>
unsigned row_ctas(const Params& p) {
  return static_cast<unsigned>((int64_t{p.tokens} * kStreams - 1) / kRowThreads + 1);
}

// Launches the weights of all tokens, and then a streaming kernel with programmatic dependent launch (PDL).
template <int kStreams, auto kStream>
const char* launch_both(const Params& p, cudaStream_t stream) {
  const char* error =
      launch_kernel<mixing_kernel<kStreams>>(p.device, row_ctas<kStreams>(p), kRowThreads, 0, stream, p);
  if (error != nullptr) return error;
  // The fewest threads that take the columns in the fewest rounds.
  const int warps = (p.columns / kPieceColumns - 1) / kWarpThreads + 1;
  const int turns = (warps - 1) / (kMaxThreads / kWarpThreads) + 1, threads = ((warps - 1) / turns + 1) * kWarpThreads;
  return launch_kernel<kStream>(p.device, Grid(p.tokens, 1, /*programmatic=*/true), threads, 0, stream, p);
}

template <int kStreams>
const char* launch_bwd_streams(const Params& p, cudaStream_t stream) {
  const char* error = launch_both<kStreams, mhc_post_bwd_kernel<kStreams>>(p, stream);
  if (error != nullptr) return error;
  const Grid grid(row_ctas<kStreams>(p), 1, /*programmatic=*/true);
  return launch_kernel<mixing_bwd_kernel<kStreams>>(p.device, grid, kRowThreads, 0, stream, p);
}

}  // namespace

const char* launch_fwd(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_both<2, mhc_post_fwd_kernel<2>>(p, s) : launch_both<4, mhc_post_fwd_kernel<4>>(p, s);
}

const char* launch_bwd(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_bwd_streams<2>(p, s) : launch_bwd_streams<4>(p, s);
}

}  // namespace dsa::mhc_post
