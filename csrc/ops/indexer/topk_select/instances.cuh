// Selects the template instance and launches it.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::topk_select {

template <class T, bool kSlots, class Shape>
const char* launch_held(const Params& p, sm90::Grid grid, cudaStream_t stream) {
  return sm90::launch_kernel<held_topk_select_kernel<T, Shape, kSlots>>(p.device, grid, Shape::kThreads,
                                                                        sizeof(HeldStorage<T, Shape>), stream, p);
}

template <class T, bool kSlots, class Shape>
const char* launch_filter(const Params& p, sm90::Grid grid, cudaStream_t stream) {
  constexpr int kMoreThanHalf = sm90::kMaxSharedBytes / 2 + 1024, kUsed = sizeof(FilterStorage<T, Shape>);
  constexpr int kBytes = Shape::kCtasPerSm == 1 ? std::max(kMoreThanHalf, kUsed) : kUsed;
  return sm90::launch_kernel<filter_topk_select_kernel<T, Shape, kSlots>>(p.device, grid, Shape::kThreads, kBytes,
                                                                          stream, p);
}

// The columns of a row, plus those that a read of whole units covers before a row that is not 16-byte aligned.
template <class T>
int columns_read(const Params& p) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logits_stride * sizeof(T) % 16 == 0;
  return p.columns + (aligned ? 0 : kUnit - 1);
}

template <class T, bool kSlots>
const char* launch_rows_of(const Params& p, cudaStream_t stream) {
  const unsigned ctas = unsigned(p.rows) * p.ctas, sms = p.num_sms;
  const bool held = columns_read<T>(p) <= max_held_columns(p.ctas);
  const bool lone = !held && ctas <= (p.ctas > 2 ? sms / 2 : sms);
  // CTAs that start before the preceding kernel has ended gather on the SMs that it leaves first: if those of all SMs
  // did, some SMs would have several and others none. Where few rows are wanted that does not matter.
  const sm90::Grid grid(ctas, p.ctas, /*programmatic=*/p.wanted != nullptr || (held ? ctas <= sms / 2 : lone));
  if (held) {
    return p.ctas == 1 ? launch_held<T, kSlots, HeldShape>(p, grid, stream)
                       : launch_held<T, kSlots, HeldClusterShape>(p, grid, stream);
  }
  if (lone) return launch_filter<T, kSlots, LoneFilterShape>(p, grid, stream);
  const bool small = p.ctas == 1 && p.topk <= kMaxTopkOf<FilterShape<true>> && grid.ctas > unsigned(p.num_sms);
  return small ? launch_filter<T, kSlots, FilterShape<true>>(p, grid, stream)
               : launch_filter<T, kSlots, FilterShape<false>>(p, grid, stream);
}

template <bool kSlots>
const char* launch_rows(const Params& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.is_bf16 ? launch_rows_of<__nv_bfloat16, kSlots>(p, s) : launch_rows_of<float, kSlots>(p, s);
}

}  // namespace dsa::topk_select
