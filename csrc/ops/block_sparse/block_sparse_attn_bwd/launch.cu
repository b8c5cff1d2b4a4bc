// Selects the template instances and launches.
#include "key_gradients.cuh"
#include "ops/block_sparse/tensor_maps.h"
#include "params.h"
#include "query_gradients.cuh"
#include "sm90/launch.h"
#include "transpose.cuh"

namespace dsa::block_sparse_attn_bwd {
namespace {

template <int kColumns>
const char* launch_columns(const Params& p, cudaStream_t stream) {
  QueryMaps query_maps;
  if (!encode_blocks(&query_maps.q, p.q, p, p.heads, p.seq_q)) return "no tensor map for q";
  if (!encode_blocks(&query_maps.dout, p.dout, p, p.heads, p.seq_q)) return "no tensor map for dout";
  if (!encode_blocks(&query_maps.out, p.out, p, p.heads, p.seq_q)) return "no tensor map for out";
  if (!encode_blocks(&query_maps.k, p.k, p, p.kv_heads, p.seq_kv)) return "no tensor map for k";
  if (!encode_blocks(&query_maps.v, p.v, p, p.kv_heads, p.seq_kv)) return "no tensor map for v";
  if (!encode_blocks(&query_maps.dq, p.dq, p, p.heads, p.seq_q)) return "no tensor map for dq";
  KeyMaps key_maps{
      .q = query_maps.q, .dout = query_maps.dout, .k = query_maps.k, .v = query_maps.v, .dk = {}, .dv = {}};
  if (!encode_blocks(&key_maps.dk, p.dk, p, p.kv_heads, p.seq_kv)) return "no tensor map for dk";
  if (!encode_blocks(&key_maps.dv, p.dv, p, p.kv_heads, p.seq_kv)) return "no tensor map for dv";
  constexpr int kQueryBytes = sizeof(QueryStream<kColumns>[kStreams]),
                kKeyBytes = sizeof(KeyStream<kColumns>[kStreams]);
  static_assert(kQueryBytes <= kMaxSharedBytes && kKeyBytes <= kMaxSharedBytes);
  const unsigned sms = p.num_sms, lists = p.batch * p.heads;
  const char* error =
      launch_kernel<transpose_kernel>(p.device, lists * ranges(p.kv_blocks), kTransposeThreads, 0, stream, p);
  if (error == nullptr) {
    error =
        launch_kernel<query_gradients_kernel<kColumns>>(p.device, sms, kThreads, kQueryBytes, stream, p, query_maps);
  }
  if (error == nullptr) {
    error = launch_kernel<key_gradients_kernel<kColumns>>(p.device, sms, kThreads, kKeyBytes, stream, p, key_maps);
  }
  return error;
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params.columns == 128 ? launch_columns<128>(params, s) : launch_columns<64>(params, s);
}

}  // namespace dsa::block_sparse_attn_bwd
