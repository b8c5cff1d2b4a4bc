// Chooses the instance and the split of the reduction, and launches.
#include <algorithm>

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::fp8_gemm {
namespace {

int tiles_of(const Params& p) { return (p.width - 1) / kTileWidth + 1; }

template <int kRows>
const char* launch_rows(const Params& p, int splits, cudaStream_t stream) {
  CUtensorMap a_map, b_map;
  const auto encode = [&](CUtensorMap* map, const void* data, int rows, int64_t stride, int box_rows) {
    return encode_head_tensor(map, {data, p.columns, 1, 1, rows, 1, 0, 0, stride, 0},
                              {.columns = kBlock, .heads = 1, .positions = box_rows, .element_bytes = 1});
  };
  if (!encode(&a_map, p.a, p.rows, p.a_stride, kRows)) return "no tensor map for a";
  if (!encode(&b_map, p.b, p.width, p.b_stride, kTileWidth)) return "no tensor map for b";
  constexpr int kBytes = sizeof(SharedStorage<kRows>);
  static_assert(kBytes <= kMaxSharedBytes);
  const unsigned clusters = std::min(tiles_of(p), p.num_sms / splits);
  return launch_kernel<fp8_gemm_kernel<kRows>>(p.device, Grid(clusters * splits, splits), kThreads, kBytes, stream, p,
                                               a_map, b_map, splits);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  // Few tiles: clusters, as long as each CTA of theirs has a tile and a fair run of columns.
  int splits = 1;
  while (splits < 8 && tiles_of(p) * splits * 2 <= p.num_sms && p.columns / kBlock >= 8 * splits) splits *= 2;
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.rows <= 8) return launch_rows<8>(p, splits, s);
  if (p.rows <= 16) return launch_rows<16>(p, splits, s);
  return p.rows <= 32 ? launch_rows<32>(p, splits, s) : launch_rows<64>(p, splits, s);
}

}  // namespace dsa::fp8_gemm
