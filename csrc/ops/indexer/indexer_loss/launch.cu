// The indexer's loss of a row, and its gradient: loss = w KL(p / sum p || softmax(scores)), over the valid slots.
//
// One CTA per row. Each thread adds up its slots relative to the largest score that it has seen, the threads' sums are
// combined once, and then the gradient is written. If a thread's slots all fit, they stay in registers for that; longer
// rows are read again, from L2 if the rows in flight fit there.
#include <cmath>
#include <cstdint>

#include "params.h"
#include "sm90/launch.h"
#include "sm90/math.cuh"
#include "sm90/warpgroup.cuh"

namespace dsa::indexer_loss {
namespace {

using namespace dsa::sm90;

constexpr int kVector = 4;  // slots that are loaded at once
constexpr float kEntropyScale = 0x1p-7f;
constexpr float kNotValid = -1.f;  // instead of a weight

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * kLog2E); }

struct Slots {
  alignas(16) float score[kVector], p[kVector];  // -inf and 0 if not valid

  // Makes the scores weights relative to `top`.
  __device__ __forceinline__ void weigh(float top) {
#pragma unroll
    for (float& s : score) s = s == -INFINITY ? kNotValid : exp_fast(s - top);
  }
};

// A row of the arguments, and of dscores.
struct Row {
  const float *g_scores, *g_p;
  const bool* g_valid;
  float* g_dscores;
  int slots;
  bool loads_vectors, stores_vectors;  // 16-byte aligned

  __device__ __forceinline__ Row(const Params& p, int64_t row)
      : g_scores(p.scores + row * p.scores_stride),
        g_p(p.p + row * p.p_stride),
        g_valid(p.valid == nullptr ? nullptr : p.valid + row * p.valid_stride),
        g_dscores(p.dscores + row * p.slots),
        slots(p.slots),
        loads_vectors(((reinterpret_cast<uintptr_t>(g_scores) | reinterpret_cast<uintptr_t>(g_p)) & 15) == 0),
        stores_vectors((reinterpret_cast<uintptr_t>(g_dscores) & 15) == 0) {}

  __device__ __forceinline__ Slots load(int first) const {
    Slots r;
    if (loads_vectors && first + kVector <= slots) {
      *reinterpret_cast<float4*>(r.score) = *reinterpret_cast<const float4*>(g_scores + first);
      *reinterpret_cast<float4*>(r.p) = *reinterpret_cast<const float4*>(g_p + first);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const bool exists = first + i < slots;
        r.score[i] = exists ? g_scores[first + i] : -INFINITY;
        r.p[i] = exists ? g_p[first + i] : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (g_valid != nullptr && first + i < slots && !g_valid[first + i]) r.score[i] = -INFINITY;
      if (r.score[i] == -INFINITY) r.p[i] = 0.f;
    }
    return r;
  }

  __device__ __forceinline__ void store(int first, const float (&gradients)[kVector]) const {
    if (stores_vectors && first + kVector <= slots) {
      *reinterpret_cast<float4*>(g_dscores + first) = *reinterpret_cast<const float4*>(gradients);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (first + i < slots) g_dscores[first + i] = gradients[i];
    }
  }
};

template <class Combine>
__device__ __forceinline__ float combine_lanes(float x, const Combine& combine) {
#pragma unroll
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// Sums over slots, with s = score - top for the largest score `top`.
struct Sums {
  float top, exps, mass, entropy, cross;  // the sums are those of e^s, p, kEntropyScale p log2 p, p s

  // A difference of scores that overflows counts only where p is not 0.
  __device__ __forceinline__ void raise_top(float next) {
    if (!(next > top)) return;
    exps *= exp_fast(top - next);
    if (mass != 0.f) cross += mass * (top - next);
    top = next;
  }
  // Makes the scores weights relative to the new top.
  template <int kVectors>
  __device__ __forceinline__ void add(Slots (&r)[kVectors]) {
    float best = top;
#pragma unroll
    for (const Slots& slots : r) {
      for (float score : slots.score) best = fmaxf(best, score);
    }
    raise_top(best);
#pragma unroll
    for (Slots& slots : r) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float p = slots.p[i];
        mass += p;
        // log2_fast treats p below 2^-126 as 0. The factor keeps products of large p finite.
        entropy += p == 0.f ? 0.f : p * (__log2f(p) * kEntropyScale);
        cross += p == 0.f ? 0.f : p * (slots.score[i] - top);
      }
      slots.weigh(top);
      for (float weight : slots.score) exps += weight == kNotValid ? 0.f : weight;
    }
  }
  // Over the lanes of a warp, in a fixed order; all get the result.
  __device__ __forceinline__ void add_lanes() {
    const auto sum = [](float a, float b) { return a + b; };
    raise_top(combine_lanes(top, [](float a, float b) { return fmaxf(a, b); }));
    exps = combine_lanes(exps, sum), mass = combine_lanes(mass, sum);
    entropy = combine_lanes(entropy, sum), cross = combine_lanes(cross, sum);
  }
};

constexpr Sums kNoSlots{-INFINITY, 0.f, 0.f, 0.f, 0.f};

// Over all threads.
template <int kWarps>
__device__ __forceinline__ Sums add_threads(Sums sums, Sums (&shared)[kWarps]) {
  const int lane = threadIdx.x % kWarpThreads;
  sums.add_lanes();
  if (lane == 0) shared[threadIdx.x / kWarpThreads] = sums;
  __syncthreads();
  sums = lane < kWarps ? shared[lane] : kNoSlots;
  sums.add_lanes();
  return sums;
}

// kFits: the row has at most kThreads * kVectors * kVector slots.
template <int kThreads, int kVectors, bool kFits>
__global__ void __launch_bounds__(kThreads) indexer_loss_kernel(const __grid_constant__ Params p) {
  constexpr int kStep = kThreads * kVector;
  __shared__ Sums shared[kThreads / kWarpThreads];
  const Row row(p, blockIdx.x);
  const int first = threadIdx.x * kVector;

  Slots r[kVectors];
  const auto load = [&](int at) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) r[i] = row.load(at + i * kStep);
  };
  Sums own = kNoSlots;
  if constexpr (kFits) {
    load(first);
    own.add(r);
  } else {
    for (int at = first; at < p.slots; at += kVectors * kStep) {
      load(at);
      own.add(r);
    }
  }
  const Sums sums = add_threads(own, shared);

  const float weight = p.row_weights == nullptr ? 1.f : p.row_weights[blockIdx.x * p.row_weights_stride];
  // The sum of the target is 1, unless that of p is so small that its terms may be denormal numbers.
  constexpr float kSmallestMass = 1e-20f;
  const float divisor = fmaxf(sums.mass, kSmallestMass), share = sums.mass / divisor;
  const bool counts = weight != 0.f;  // also NaN in a row of weight 0 does not
  if (threadIdx.x == 0) {
    const float entropy = kLn2 * (sums.entropy / divisor / kEntropyScale - share * __log2f(divisor));
    const float kl = entropy - sums.cross / divisor + share * logf(sums.exps);
    p.loss[blockIdx.x] = sums.exps == 0.f || !counts ? 0.f : weight * kl;  // 0 if no slot is valid
  }
  // Of weights relative to `top`.
  const auto write_gradients = [&](int at, float top) {
    const float q_factor = exp_fast(top - sums.top) / sums.exps * share, p_factor = 1.f / divisor;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      alignas(16) float gradients[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float gradient = weight * (r[i].score[j] * q_factor - r[i].p[j] * p_factor);
        gradients[j] = r[i].score[j] == kNotValid || !counts ? 0.f : gradient;
      }
      row.store(at + i * kStep, gradients);
    }
  };
  if constexpr (kFits) {
    write_gradients(first, own.top);
  } else {
    for (int at = first; at < p.slots; at += kVectors * kStep) {
      load(at);
#pragma unroll
      for (Slots& slots : r) slots.weigh(sums.top);
      write_gradients(at, sums.top);
    }
  }
}

template <int kThreads, int kVectors, bool kFits = true>
const char* launch_rows(const Params& p, void* stream) {
  return launch_kernel<indexer_loss_kernel<kThreads, kVectors, kFits>>(p.device, unsigned(p.rows), kThreads, 0,
                                                                       static_cast<cudaStream_t>(stream), p);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  if (p.rows == 0) return nullptr;
  if (p.slots <= 128 * 4 * kVector) return launch_rows<128, 4>(p, stream);
  if (p.slots <= 512 * 4 * kVector) return launch_rows<512, 4>(p, stream);
  return launch_rows<1024, 2, false>(p, stream);
}

}  // namespace dsa::indexer_loss
