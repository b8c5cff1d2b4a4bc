// Selects the template instance and launches it.
#pragma once

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::topk_select {

template <class T, bool kSlots, class Shape>
const char* launch_held(const KernelParams& p, sm90::Grid grid, cudaStream_t stream) {
  constexpr int kBytes = Shape::kIsLone ? sm90::kMaxSharedBytes : int{sizeof(HeldStorage<T, Shape>)};
  return sm90::launch_kernel<held_topk_select_kernel<T, Shape, kSlots>>(p.device, grid, Shape::kThreads, kBytes, stream,
                                                                        p);
}

template <class T, class Shape>
constexpr int filter_bytes() {
  constexpr int kBytes = sizeof(FilterStorage<T, Shape>);
  constexpr int kSmBytes = 228 * 1024, kReserved = 1024;  // of an SM; of each CTA
  static_assert(Shape::kCtasPerSm * (kBytes + kReserved) <= kSmBytes);
  static_assert((Shape::kCtasPerSm + 1) * (kBytes + kReserved) > kSmBytes);
  return kBytes;
}

template <class T, bool kSlots, class Shape>
const char* launch_filter(const KernelParams& p, sm90::Grid grid, cudaStream_t stream) {
  return sm90::launch_kernel<filter_topk_select_kernel<T, Shape, kSlots>>(p.device, grid, Shape::kThreads,
                                                                          filter_bytes<T, Shape>(), stream, p);
}

template <class T, bool kSlots>
Plan plan_of(const Params& p, int columns) {
  return plan_row(p.rows, columns, p.is_bf16, p.num_sms, [&](int ctas) {
    using Shape = LoneFilterShape;
    int clusters = 0;
    sm90::count_clusters<filter_topk_select_kernel<T, Shape, kSlots>>(p.device, ctas, Shape::kThreads,
                                                                      filter_bytes<T, Shape>(), &clusters);
    return clusters;  // of a size that the device has no room for: none
  });
}

// The columns of a row, plus those that a read of whole units covers before a row that is not 16-byte aligned.
template <class T>
int columns_read(const Params& p) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logits_stride * sizeof(T) % 16 == 0;
  return p.columns + (aligned ? 0 : kUnit - 1);
}

template <class T, bool kSlots>
const char* launch_rows_of(const Params& params, cudaStream_t stream) {
  const int columns = columns_read<T>(params);
  const Plan plan = plan_of<T, kSlots>(params, columns);
  const KernelParams p{params, plan.ctas};
  const unsigned ctas = unsigned(p.rows) * p.ctas, sms = p.num_sms;
  const bool lone = ctas <= sms;
  // CTAs that start before the preceding kernel has ended gather on the SMs that are free first, as many on one as have
  // room there. That does no harm if an SM takes only one CTA, or if few rows are wanted.
  const sm90::Grid grid(ctas, p.ctas, /*programmatic=*/p.wanted != nullptr || lone);
  if (plan.held) {
    if (!lone) return launch_held<T, kSlots, HeldShape>(p, grid, stream);
    if constexpr (max_held(sizeof(T) == 2) > HeldShape::kHeld) {
      if (columns > HeldShape::kHeld * p.ctas) return launch_held<T, kSlots, LoneHeldShape<false>>(p, grid, stream);
    }
    return launch_held<T, kSlots, LoneHeldShape<true>>(p, grid, stream);
  }
  if (lone) return launch_filter<T, kSlots, LoneFilterShape>(p, grid, stream);
  return p.topk <= kMaxTopkOf<FilterShape<true>> ? launch_filter<T, kSlots, FilterShape<true>>(p, grid, stream)
                                                 : launch_filter<T, kSlots, FilterShape<false>>(p, grid, stream);
}

template <bool kSlots>
const char* launch_rows(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.is_bf16 ? launch_rows_of<__nv_bfloat16, kSlots>(p, s) : launch_rows_of<float, kSlots>(p, s);
}

}  // namespace dsa::topk_select
