// Encodes the tensor maps and launches.
#include "kernel.cuh"
#include "ops/sparse_mla/sparse_mha/tensor_maps.h"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::sparse_mha_fwd {

const char* launch(const Params& p, void* stream) {
  Maps maps;
  if (!encode_rows(&maps.q, p.q, p, kColumns, p.heads, p.seq_q, kGroupRows)) return "no tensor map for q";
  if (!encode_rows(&maps.k, p.k, p, kNope, p.heads, p.seq_kv, kBlock)) return "no tensor map for k";
  if (!encode_rows(&maps.k_rope, p.k_rope, p, kRope, 1, p.seq_kv, kBlock)) return "no tensor map for k_rope";
  if (!encode_rows(&maps.v, p.v, p, kValueColumns, p.heads, p.seq_kv, kBlock)) return "no tensor map for v";
  static_assert(sizeof(SharedStorage) <= kMaxSharedBytes);
  const Schedule schedule(p);
  return launch_kernel<sparse_mha_fwd_kernel>(p.device, schedule.ctas(), kThreads, sizeof(SharedStorage),
                                              static_cast<cudaStream_t>(stream), p, schedule, maps);
}

}  // namespace dsa::sparse_mha_fwd
