// Launches the main kernel and, if keys are split, the kernel that combines the parts.
#include <algorithm>

#include "combine.cuh"
#include "launches.h"
#include "ops/sparse_mla/sparse_mla_fwd/params.h"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::sparse_mla_decode {
namespace {

// bf16 keys: the main kernel is that of sparse_mla_fwd, for which tokens are queries of a sequence.
const char* launch_bf16(const Params& p, void* stream) {
  sparse_mla_fwd::Params params{};
  params.q = p.q;
  params.kv = p.kv_cache;
  params.indices = p.indices;
  params.topk_length = p.topk_length;
  params.attn_sink = p.attn_sink;
  params.q_stride_b = p.q_stride_b, params.q_stride_s = p.q_stride_n, params.q_stride_h = p.q_stride_h;
  params.indices_stride_b = p.indices_stride_b, params.indices_stride_s = p.indices_stride_n;
  params.topk_length_stride_b = p.topk_length_stride_b, params.topk_length_stride_s = p.topk_length_stride_n;
  params.attn_sink_stride = p.attn_sink_stride;
  params.batch = p.batch, params.seq_q = p.tokens, params.seq_kv = p.slots;
  params.heads = p.heads, params.groups = 1, params.topk = p.topk;
  params.d_qk = p.d_qk, params.d_v = kValueColumns;
  params.device = p.device, params.num_sms = p.num_sms;
  params.sm_scale = p.sm_scale;
  params.out = p.out, params.lse = p.lse;
  params.partial_out = static_cast<float*>(p.partial_out), params.partial_lse = p.partial_lse;
  params.splits = p.plan.splits;
  const sparse_mla_fwd::Pages pages{p.page_bytes, p.slot_bytes, p.page > 0 ? p.page : 1};
  return sparse_mla_fwd::launch_paged(params, pages, p.plan.splits > 1 ? -INFINITY : p.empty_lse, stream);
}

template <int kThreads, class Part>
const char* launch_combine(const KernelParams& p, int64_t least_bytes, cudaStream_t stream) {
  const Grid grid(unsigned(p.rows), 1, /*programmatic=*/true);
  const int64_t bytes =
      std::max<int64_t>(kSumBytes<kThreads, Part>, std::min<int64_t>(least_bytes, kSharedBytesByDefault));
  return launch_kernel<combine_kernel<kThreads, Part>>(p.device, grid, kThreads, bytes, stream, p);
}

// CTAs that start before the main kernel has ended gather on the SMs that it leaves free. Where at most two rows come
// to each of these, many threads share a row. Elsewhere, a CTA asks for so much shared memory that an SM takes only its
// share of all rows, but at least four: with more than 48 KB, a kernel would need an attribute.
template <class Part>
const char* launch_combine(const KernelParams& p, cudaStream_t stream) {
  if (p.rows <= 2 * (p.num_sms - p.items)) return launch_combine<512, Part>(p, 0, stream);
  constexpr int kThreads = 128;
  // Shared memory of an SM; its unit of allocation; what each CTA takes besides its own.
  constexpr int kSmBytes = 228 * 1024, kUnitBytes = 128, kReservedBytes = 1024;
  constexpr int64_t kMostCtas = 2048 / kThreads;  // of an SM, by their threads
  const int64_t share = std::min(ceil_div(p.rows, p.num_sms), kMostCtas);
  return launch_combine<kThreads, Part>(p, kSmBytes / share / kUnitBytes * kUnitBytes - kReservedBytes, stream);
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  const KernelParams p(params);
  const auto s = static_cast<cudaStream_t>(stream);
  const bool wide = is_wide(p.plan, p.is_packed);
  const char* error = !p.is_packed ? launch_bf16(p, stream) : wide ? launch_wide(p, s) : launch_narrow(p, s);
  if (error == nullptr && p.plan.splits > 1) {
    error = wide ? launch_combine<HalfPart>(p, s) : launch_combine<FloatPart>(p, s);
  }
  return error;
}

}  // namespace dsa::sparse_mla_decode
