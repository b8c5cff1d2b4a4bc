// Selects the template instances and launches.
#include "kernels.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::mhc_pre_bwd {
namespace {

// Launches the kernels that run over tokens, of which there must be one at least.
template <int kStreams>
const char* launch_tokens(const Params& p, cudaStream_t stream) {
  CUtensorMap x_map, dh_in_map, dx_map;
  const auto encode = [&](CUtensorMap* map, const void* data, int streams) {  // tokens as heads, streams as positions
    return encode_head_tensor(map,
                              {data, p.columns, p.tokens, 1, streams, 1, int64_t{streams} * p.columns, 0, p.columns, 0},
                              {.columns = kChunk, .heads = kTokens, .positions = streams});
  };
  if (!encode(&x_map, p.x, kStreams)) return "no tensor map for x";
  if (!encode(&dh_in_map, p.dh_in, 1)) return "no tensor map for dh_in";
  if (!encode(&dx_map, p.dx, kStreams)) return "no tensor map for dx";
  constexpr int kBytes = sizeof(ColumnStorage<kStreams>);
  static_assert(ctas_per_sm(kStreams) * (kBytes + 1024) <= kMaxSharedBytes + 1024);
  const cudaError_t error = cudaMemsetAsync(p.messages, 0xff, p.message_bytes, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const Grid column_grid(p.columns / kColumns * p.runs);
  return launch_kernel<columns_kernel<kStreams>>(p.device, column_grid, Shape<kStreams>::kThreads, kBytes, stream, p,
                                                 x_map, dh_in_map, dx_map);
}

template <int kStreams>
const char* launch_streams(const Params& p, cudaStream_t stream) {
  const char* error = p.tokens > 0 ? launch_tokens<kStreams>(p, stream) : nullptr;
  if (error != nullptr) return error;
  const unsigned reduce_ctas = (kStreams * p.columns - 1) / kReduceColumns + 1 + Shape<kStreams>::kMixed + 3;
  const Grid reduce_grid(reduce_ctas, 1, /*programmatic=*/true);
  return launch_kernel<reduce_kernel<kStreams>>(p.device, reduce_grid, kReduceThreads, 0, stream, p);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.streams == 2 ? launch_streams<2>(p, s) : launch_streams<4>(p, s);
}

}  // namespace dsa::mhc_pre_bwd
