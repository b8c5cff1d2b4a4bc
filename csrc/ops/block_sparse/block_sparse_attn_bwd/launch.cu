// Selects the template instances and launches.
#include "kernel.cuh"
#include "ops/block_sparse/tensor_maps.h"
#include "params.h"
#include "prepare.cuh"
#include "sm90/launch.h"

namespace dsa::block_sparse_attn_bwd {
namespace {

template <int kColumns>
const char* launch_columns(const Params& p, cudaStream_t stream) {
  Maps maps;
  if (!encode_blocks(&maps.q, p.q, p, p.heads, p.seq_q)) return "no tensor map for q";
  if (!encode_blocks(&maps.dout, p.dout, p, p.heads, p.seq_q)) return "no tensor map for dout";
  if (!encode_blocks(&maps.k, p.k, p, p.kv_heads, p.seq_kv)) return "no tensor map for k";
  if (!encode_blocks(&maps.v, p.v, p, p.kv_heads, p.seq_kv)) return "no tensor map for v";
  if (!encode_blocks(&maps.dq, p.dq, p, p.heads, p.seq_q)) return "no tensor map for dq";
  if (!encode_blocks(&maps.dk, p.dk, p, p.kv_heads, p.seq_kv)) return "no tensor map for dk";
  if (!encode_blocks(&maps.dv, p.dv, p, p.kv_heads, p.seq_kv)) return "no tensor map for dv";
  constexpr int kBytes = sizeof(Stream<kColumns>[kStreams]);
  static_assert(kBytes <= kMaxSharedBytes);
  const int64_t lists = int64_t{p.batch} * p.heads, rows = lists * p.q_blocks * kBlock;
  constexpr int64_t kRows = rows_per_cta<kColumns>();
  const auto preparing = static_cast<unsigned>(lists * ranges(p.kv_blocks) + (rows + kRows - 1) / kRows);
  const char* error = launch_kernel<prepare_kernel<kColumns>>(p.device, preparing, kPrepareThreads, 0, stream, p);
  if (error == nullptr) {
    const Grid grid(unsigned(p.num_sms), 1, true);
    error = launch_kernel<gradients_kernel<kColumns>>(p.device, grid, kThreads, kBytes, stream, p, maps);
  }
  return error;
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params.columns == 128 ? launch_columns<128>(params, s) : launch_columns<64>(params, s);
}

}  // namespace dsa::block_sparse_attn_bwd
