// Splits the work, selects the template instance and launches.
#include <algorithm>

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::fp8_gemm {
namespace {

constexpr int kMaxSplits = 8, kMinBlocks = 4;  // kMinBlocks: blocks of columns per CTA of a cluster
constexpr int kTileCost = 16;                  // fixed cost per tile, in rows of b

int parts_of(int size, int part) { return (size - 1) / part + 1; }

// Chooses the cut with the least work for its longest CTA.
template <int kRows>
const char* cut_work(const Params& p, Cut* best) {
  const int blocks = p.columns / kBlock;
  int least = INT32_MAX;
  for (int splits = 1; splits == 1 || (splits <= kMaxSplits && blocks >= kMinBlocks * splits); splits *= 2) {
    int clusters = p.num_sms;
    if (splits > 1) {
      const char* error =
          count_clusters<fp8_gemm_kernel<kRows>>(p.device, splits, kThreads, sizeof(SharedStorage<kRows>), &clusters);
      if (error != nullptr) return error;
    }
    clusters = std::min(clusters, p.num_sms / splits);
    for (int width : {64, 56, 48}) {
      const int tiles = parts_of(p.width, width), rounds = parts_of(tiles, clusters);
      const int cost = rounds * (width + kTileCost) * kMaxSplits / splits;
      if ((splits > 1 && rounds > 1) || cost >= least) continue;
      least = cost, *best = {width, tiles, splits, std::min(tiles, clusters)};
    }
  }
  return nullptr;
}

template <int kRows>
const char* launch_rows(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedStorage<kRows>);
  static_assert(kBytes <= kMaxSharedBytes);
  Cut cut;
  const char* error = cut_work<kRows>(p, &cut);
  if (error != nullptr) return error;
  CUtensorMap a_map, b_map;
  const auto encode = [&](CUtensorMap* map, const void* data, int rows, int64_t stride, int box_rows) {
    return encode_head_tensor(map, {data, p.columns, 1, 1, rows, 1, 0, 0, stride, 0},
                              {.columns = kBlock,
                               .heads = 1,
                               .positions = box_rows,
                               .element_bytes = 1,
                               .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B});
  };
  if (!encode(&a_map, p.a, p.rows, p.a_stride, kRows)) return "no tensor map for a";
  if (!encode(&b_map, p.b, p.width, p.b_stride, cut.width)) return "no tensor map for b";
  const Grid grid(unsigned(cut.clusters * cut.splits), unsigned(cut.splits), /*programmatic=*/true);
  return launch_kernel<fp8_gemm_kernel<kRows>>(p.device, grid, kThreads, kBytes, stream, p, a_map, b_map, cut);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.rows <= 8) return launch_rows<8>(p, s);
  if (p.rows <= 16) return launch_rows<16>(p, s);
  return p.rows <= 32 ? launch_rows<32>(p, s) : launch_rows<64>(p, s);
}

}  // namespace dsa::fp8_gemm
