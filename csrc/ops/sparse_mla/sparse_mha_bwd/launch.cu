// Launches the kernels: gradients of keys and then of queries, for some heads at a time, which use three buffers of dS
// in turn. Each kernel starts in the tail of the preceding one, so the order is keys 0, keys 1, queries 0, keys 2,
// queries 1, and so on: keys 3 use the buffer of queries 0, which are complete when queries 1 start.
#include <algorithm>

#include "finish.cuh"
#include "key_gradients.cuh"
#include "ops/sparse_mla/sparse_mha/tensor_maps.h"
#include "prepare.cuh"
#include "query_gradients.cuh"
#include "sm90/launch.h"

namespace dsa::sparse_mha_bwd {
namespace {

// Returns null, or a text that says what failed.
const char* encode_maps(Maps* maps, const Params& p) {
  if (!encode_rows(&maps->q, p.q, p, kColumns, p.heads, p.seq_q, kTileRows)) return "no tensor map for q";
  if (!encode_rows(&maps->dout, p.dout, p, kValueColumns, p.heads, p.seq_q, kTileRows)) return "no tensor map for dout";
  if (!encode_rows(&maps->k, p.k, p, kNope, p.heads, p.seq_kv, kTileRows)) return "no tensor map for k";
  if (!encode_rows(&maps->k_rope, p.k_rope, p, kRope, 1, p.seq_kv, kTileRows)) return "no tensor map for k_rope";
  if (!encode_rows(&maps->v, p.v, p, kValueColumns, p.heads, p.seq_kv, kTileRows)) return "no tensor map for v";
  return nullptr;
}

const char* launch_prepare(const Params& p, cudaStream_t s) {
  return launch_kernel<prepare_kernel>(p.device, unsigned(prepare_ctas(p)), kPrepareThreads, 0, s, p);
}

// `early`: in the tail of the preceding kernel.
const char* launch_keys(const Params& p, const Maps& maps, int first_head, int end_head, cudaStream_t s,
                        bool early = false) {
  constexpr int kBytes = sizeof(KeyStorage);
  static_assert(kBytes <= kMaxSharedBytes);
  const int items = p.batch * p.mask.kv_blocks * divide_up(end_head - first_head, p.heads_together);
  return launch_kernel<key_gradients_kernel>(p.device, Grid(items, 1, early), kKeyThreads, kBytes, s, p, maps,
                                             first_head, end_head);
}

const char* launch_queries(const Params& p, const Maps& maps, int first_head, int end_head, cudaStream_t s,
                           bool early = false) {
  constexpr int kBytes = sizeof(QueryStorage);
  static_assert(kBytes <= kMaxSharedBytes);
  const int items = p.batch * divide_up(p.mask.q_blocks, 2) * divide_up(end_head - first_head, p.heads_together);
  return launch_kernel<query_gradients_kernel>(p.device, Grid(items, 1, early), kQueryThreads, kBytes, s, p, maps,
                                               first_head, end_head);
}

const char* launch_finish(const Params& p, cudaStream_t s) {
  const int64_t ctas = (finish_groups(p) + kFinishThreads - 1) / kFinishThreads;
  return launch_kernel<finish_kernel>(p.device, unsigned(ctas), kFinishThreads, 0, s, p);
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  Maps maps;
  const char* error = encode_maps(&maps, params);
  if (error == nullptr) error = launch_prepare(params, s);
  const int launches = divide_up(params.heads, params.heads_at_once);
  const auto first = [&](int i) { return i * params.heads_at_once; };
  const auto end = [&](int i) { return std::min(params.heads, first(i + 1)); };
  for (int i = 0; i <= launches && error == nullptr; ++i) {
    if (i < launches) error = launch_keys(params, maps, first(i), end(i), s, i > 0);
    if (i > 0 && error == nullptr) error = launch_queries(params, maps, first(i - 1), end(i - 1), s, launches > 1);
  }
  return error == nullptr ? launch_finish(params, s) : error;
}

}  // namespace dsa::sparse_mha_bwd
