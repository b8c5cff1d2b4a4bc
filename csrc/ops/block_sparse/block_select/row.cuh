// The threads that share a row: exchange between them, and the sort of the row's weights.
#pragma once

#include <cmath>

namespace dsa::block_select {

inline constexpr int kItems = 16;  // per thread

// Shared memory of a row's warps. A row of one warp does not need it.
template <int kWarps>
struct Storage {
  float weights[kItems][32 * kWarps];
  long long masses[kWarps], moments[kWarps];
  int counts[kWarps], above[kWarps], equal[kWarps];
  float largest, threshold;
};

template <class T>
struct Sums {
  T before, all;
};

template <int kWarps>
struct Row {
  Storage<kWarps>& shared;
  int thread = threadIdx.x % (32 * kWarps), lane = thread % 32, warp = thread / 32;

  // Broadcasts x of one thread. `slot` must not serve any other call.
  __device__ __forceinline__ float broadcast(int owner, float x, float& slot) const {
    if constexpr (kWarps == 1) return __shfl_sync(~0u, x, owner);
    if (thread == owner) slot = x;
    __syncthreads();
    return slot;
  }

  // Sums of an x that is the same in all lanes of a warp: over earlier warps, and over all. `slots` serve one call.
  template <class T>
  __device__ __forceinline__ Sums<T> sum_warps(T x, T (&slots)[kWarps]) const {
    if constexpr (kWarps == 1) return {0, x};
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    Sums<T> sums{};
#pragma unroll 2
    for (int other = 0; other < kWarps; ++other) {
      const T theirs = slots[other];
      sums.before += other < warp ? theirs : 0;
      sums.all += theirs;
    }
    return sums;
  }

  // Replaces x by that of thread ^ mask.
  __device__ __forceinline__ void trade(float (&x)[kItems], int mask) const {
    if (kWarps == 1 || mask < 32) {
#pragma unroll
      for (float& item : x) item = __shfl_xor_sync(~0u, item, mask);
    } else {
      __syncthreads();  // the previous exchange has been read
#pragma unroll
      for (int i = 0; i < kItems; ++i) shared.weights[i][thread] = x[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) x[i] = shared.weights[i][thread ^ mask];
    }
  }

  // Bitonic sort: runs in descending order merge into runs twice as long. A merge compares each place with its mirror
  // image in the run, then with those at halving distances; the lower place keeps the larger weight. Item i of thread t
  // ends at place t * kItems + i.
  __device__ __forceinline__ void sort(float (&x)[kItems]) const {
#pragma unroll
    for (int run = 2; run <= kItems; run *= 2) {
      compare_items(x, run - 1);
#pragma unroll
      for (int distance = run / 4; distance > 0; distance /= 2) compare_items(x, distance);
    }
#pragma unroll 1
    for (int run = 2; run <= 32 * kWarps; run *= 2) {  // in threads
      compare_threads<true>(x, run - 1);
#pragma unroll 1
      for (int distance = run / 4; distance > 0; distance /= 2) compare_threads<false>(x, distance);
#pragma unroll
      for (int distance = kItems / 2; distance > 0; distance /= 2) compare_items(x, distance);
    }
  }

 private:
  __device__ __forceinline__ static void compare_items(float (&x)[kItems], int mask) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i > (i ^ mask)) continue;
      const float a = x[i], b = x[i ^ mask];
      x[i] = fmaxf(a, b);
      x[i ^ mask] = fminf(a, b);
    }
  }

  template <bool kMirrored>
  __device__ __forceinline__ void compare_threads(float (&x)[kItems], int mask) const {
    float other[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) other[i] = x[kMirrored ? kItems - 1 - i : i];
    trade(other, mask);
    const bool lower = thread < (thread ^ mask);
#pragma unroll
    for (int i = 0; i < kItems; ++i) x[i] = lower ? fmaxf(x[i], other[i]) : fminf(x[i], other[i]);
  }
};

}  // namespace dsa::block_select
