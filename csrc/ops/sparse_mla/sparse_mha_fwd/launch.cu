// Encodes the tensor maps and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mha_fwd {
namespace {

// A box is `rows` positions of one head by 64 columns. Returns false when the driver refuses.
bool encode(CUtensorMap* map, const Heads& t, const Params& p, int columns, int heads, int positions, int rows) {
  return encode_head_tensor(map, {t.data, columns, heads, 1, positions, p.batch, t.stride_h, 0, t.stride_s, t.stride_b},
                            {.heads = 1, .positions = rows});
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  Maps maps;
  if (!encode(&maps.q, p.q, p, kColumns, p.heads, p.seq_q, kGroupRows)) return "no tensor map for q";
  if (!encode(&maps.k, p.k, p, kNope, p.heads, p.seq_kv, kBlock)) return "no tensor map for k";
  if (!encode(&maps.k_rope, p.k_rope, p, kRope, 1, p.seq_kv, kBlock)) return "no tensor map for k_rope";
  if (!encode(&maps.v, p.v, p, kValueColumns, p.heads, p.seq_kv, kBlock)) return "no tensor map for v";
  static_assert(sizeof(SharedStorage) <= kMaxSharedBytes);
  const Schedule schedule(p);
  return launch_kernel<sparse_mha_fwd_kernel>(p.device, schedule.ctas(), kThreads, sizeof(SharedStorage),
                                              static_cast<cudaStream_t>(stream), p, schedule, maps);
}

}  // namespace dsa::sparse_mha_fwd
