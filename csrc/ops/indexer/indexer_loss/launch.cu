// The indexer's loss of a row, and its gradient: loss = w KL(p / sum p || softmax(scores)), over the valid slots.
//
// One CTA per row, in three passes: the maximum score, the sums, the gradient. The last two read the row from cache.
#include <cmath>

#include "params.h"
#include "sm90/launch.h"

namespace dsa::indexer_loss {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Reduces one value per thread, in a fixed order; all threads get the result. `shared` must not be in use.
template <class Combine>
__device__ __forceinline__ float combine_threads(float x, float (&shared)[kWarps], Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) x = combine(x, shared[warp]);
  return x;
}

__global__ void __launch_bounds__(kThreads) indexer_loss_kernel(const __grid_constant__ Params p) {
  __shared__ float shared[5][kWarps];
  const int64_t row = blockIdx.x;
  const float* g_scores = p.scores + row * p.scores_stride;
  const float* g_p = p.p + row * p.p_stride;
  const bool* g_valid = p.valid == nullptr ? nullptr : p.valid + row * p.valid_stride;
  // -inf if a slot is not valid.
  const auto score_at = [&](int slot) { return g_valid == nullptr || g_valid[slot] ? g_scores[slot] : -INFINITY; };
  const auto for_slots = [&](auto act) {
#pragma unroll 4
    for (int slot = threadIdx.x; slot < p.slots; slot += kThreads) act(slot, score_at(slot));
  };
  const auto add = [](float a, float b) { return a + b; };

  float top = -INFINITY;
  for_slots([&](int, float score) { top = fmaxf(top, score); });
  top = combine_threads(top, shared[0], [](float a, float b) { return fmaxf(a, b); });

  float exps = 0.f, mass = 0.f, entropy = 0.f, cross = 0.f;  // sums of e^s, p, p log p, p s, with s = score - top
  for_slots([&](int slot, float score) {
    if (score == -INFINITY) return;
    const float p_slot = g_p[slot];
    exps += expf(score - top);
    mass += p_slot;
    entropy += p_slot > 0.f ? p_slot * logf(p_slot) : 0.f;
    if (p_slot != 0.f) cross += p_slot * (score - top);  // the difference may overflow
  });
  exps = combine_threads(exps, shared[1], add);
  mass = combine_threads(mass, shared[2], add);
  entropy = combine_threads(entropy, shared[3], add);
  cross = combine_threads(cross, shared[4], add);

  const float weight = p.row_weights == nullptr ? 1.f : p.row_weights[row * p.row_weights_stride];
  const float divisor = fmaxf(mass, 1e-10f), share = mass / divisor;  // of the target's sum; should be 1
  if (threadIdx.x == 0) {
    const float kl = (entropy - cross) / divisor - share * logf(divisor) + share * logf(exps);
    p.loss[row] = exps == 0.f ? 0.f : weight * kl;  // 0 if no slot is valid
  }
  float* g_dscores = p.dscores + row * p.slots;
  for_slots([&](int slot, float score) {
    g_dscores[slot] = score == -INFINITY ? 0.f : weight * (expf(score - top) / exps * share - g_p[slot] / divisor);
  });
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  if (p.rows == 0) return nullptr;
  return sm90::launch_kernel<indexer_loss_kernel>(p.device, unsigned(p.rows), kThreads, 0,
                                                  static_cast<cudaStream_t>(stream), p);
}

}  // namespace dsa::indexer_loss
