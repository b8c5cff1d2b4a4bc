// Selects the template instance and launches.
#include "combine.cuh"
#include "kernel.cuh"
#include "ops/block_sparse/tensor_maps.h"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::block_sparse_attn_fwd {
namespace {

template <int kColumns>
const char* launch_columns(const Params& p, cudaStream_t stream) {
  CUtensorMap q_map, k_map, v_map, out_map;
  if (!encode_blocks(&q_map, p.q, p, p.heads, p.seq_q)) return "no tensor map for q";
  if (!encode_blocks(&k_map, p.k, p, p.kv_heads, p.seq_kv)) return "no tensor map for k";
  if (!encode_blocks(&v_map, p.v, p, p.kv_heads, p.seq_kv)) return "no tensor map for v";
  if (!encode_blocks(&out_map, p.out, p, p.heads, p.seq_q)) return "no tensor map for out";
  constexpr int kBytes = sizeof(SharedStorage<kColumns>);
  static_assert(kBytes <= kMaxSharedBytes);
  const char* error = launch_kernel<block_sparse_attn_fwd_kernel<kColumns>>(
      p.device, unsigned(p.num_sms), kThreads, kBytes, stream, p, q_map, k_map, v_map, out_map);
  if (error == nullptr && has_parts(p.plan)) {
    const Grid grid(unsigned(p.plan.cut * kBlock), 1, /*programmatic=*/true);
    error = launch_kernel<combine_kernel<kColumns>>(p.device, grid, kCombineThreads, 0, stream, p);
  }
  return error;
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params.columns == 128 ? launch_columns<128>(params, s) : launch_columns<64>(params, s);
}

}  // namespace dsa::block_sparse_attn_fwd
