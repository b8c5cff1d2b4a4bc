// Encodes the tensor maps, divides the work, and launches.
#include <algorithm>
#include <cmath>

#include "gather.cuh"
#include "kernel.cuh"
#include "ops/sparse_mla/sparse_mha/tensor_maps.h"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::sparse_mha_dist {
namespace {

// Tiles of a query block, halves included, if its queries list keys everywhere.
double visible_tiles(const Problem& p, const Lists& lists, int block) {
  return p.batch * double(most_key_blocks(lists, p.mask, block)) / kTileBlocks;
}

}  // namespace

Split choose_split(const Problem& p, const Lists& lists) {
  constexpr int kMaxParts = 6;
  constexpr double kHeadsOfPart = 2.5;  // a part takes as much longer as this number of heads
  double tiles = 0;
  for (int block = 0; block < p.mask.q_blocks; ++block) tiles += visible_tiles(p, lists, block);
  double rest = tiles - std::floor(tiles / p.num_sms) * p.num_sms;  // beyond whole rounds of all SMs
  Split split;
  double least = INFINITY;
  for (int parts = 1; parts <= std::min(kMaxParts, p.heads); ++parts) {
    const double time = std::ceil(rest * parts / p.num_sms) / parts + kHeadsOfPart / p.heads * (parts - 1);
    if (time < least) least = time, split.parts = parts;
  }
  if (split.parts == 1) return split;
  for (; split.blocks < p.mask.q_blocks && rest > 0; ++split.blocks) rest -= visible_tiles(p, lists, split.blocks);
  return split;
}

const char* launch_tiles(const Params& p, void* stream) {
  Maps maps;
  if (!encode_rows(&maps.q, p.q, p, kColumns, p.heads, p.seq_q, kGroupRows)) return "no tensor map for q";
  if (!encode_rows(&maps.k, p.k, p, kNope, p.heads, p.seq_kv, kBlock)) return "no tensor map for k";
  if (!encode_rows(&maps.k_rope, p.k_rope, p, kRope, 1, p.seq_kv, kBlock)) return "no tensor map for k_rope";
  static_assert(sizeof(SharedStorage) <= kMaxSharedBytes);
  return launch_kernel<sparse_mha_dist_kernel>(p.device, unsigned(count_items(p)), kThreads, sizeof(SharedStorage),
                                               static_cast<cudaStream_t>(stream), p, maps);
}

const char* launch_gather(const Params& p, const Lists& lists, void* stream) {
  return launch_kernel<gather_kernel>(p.device, unsigned(p.batch * p.seq_q), kGatherThreads, 0,
                                      static_cast<cudaStream_t>(stream), p, lists);
}

const char* launch(const Params& p, const Lists& lists, void* stream) {
  const char* error = launch_tiles(p, stream);
  return error != nullptr ? error : launch_gather(p, lists, stream);
}

}  // namespace dsa::sparse_mha_dist
