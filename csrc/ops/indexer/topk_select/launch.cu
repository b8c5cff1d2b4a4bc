// Selects the template instance and launches.
#include "kernel.cuh"
#include "params.h"
#include "sm90/launch.h"

namespace dsa::topk_select {
namespace {

template <class T, class Shape>
const char* launch_held(const Params& p, sm90::Grid grid, cudaStream_t stream) {
  return sm90::launch_kernel<held_topk_select_kernel<T, Shape>>(p.device, grid, Shape::kThreads,
                                                                sizeof(HeldStorage<T, Shape>), stream, p);
}

template <class T, class Shape>
const char* launch_filter(const Params& p, sm90::Grid grid, cudaStream_t stream) {
  return sm90::launch_kernel<filter_topk_select_kernel<T, Shape>>(p.device, grid, Shape::kThreads,
                                                                  sizeof(FilterStorage<T, Shape>), stream, p);
}

// The columns of a row, plus those that a read of whole units covers before a row that is not 16-byte aligned.
template <class T>
int columns_read(const Params& p) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logits_stride * sizeof(T) % 16 == 0;
  return p.columns + (aligned ? 0 : kUnit - 1);
}

// Whether the largest clusters can hold rows that `p.ctas` CTAs would have to filter, and all run at once.
template <class T>
bool fits_large_clusters(const Params& p) {
  using Shape = HeldClusterShape;
  const int columns = columns_read<T>(p);
  if (columns <= kMaxHeldRun * p.ctas || columns > kMaxHeldRun * kMaxHeldCtas) return false;
  int clusters = 0;
  const char* error = sm90::count_clusters<held_topk_select_kernel<T, Shape>>(p.device, kMaxHeldCtas, Shape::kThreads,
                                                                              sizeof(HeldStorage<T, Shape>), &clusters);
  return error == nullptr && p.rows <= clusters;
}

template <class T>
const char* launch_rows_of(Params p, cudaStream_t stream) {
  if (p.rows * kMaxHeldCtas <= p.num_sms && fits_large_clusters<T>(p)) p.ctas = kMaxHeldCtas;
  const sm90::Grid grid(unsigned(p.rows) * p.ctas, p.ctas, p.programmatic);
  if (columns_read<T>(p) <= kMaxHeldRun * p.ctas) {
    return p.ctas == 1 ? launch_held<T, HeldShape>(p, grid, stream) : launch_held<T, HeldClusterShape>(p, grid, stream);
  }
  const bool small = p.topk <= kMaxTopkOf<FilterShape<true>> && grid.ctas > unsigned(p.num_sms);
  return small ? launch_filter<T, FilterShape<true>>(p, grid, stream)
               : launch_filter<T, FilterShape<false>>(p, grid, stream);
}

}  // namespace

const char* launch(const Params& p, void* stream) {
  if (p.rows == 0) return nullptr;
  const auto s = static_cast<cudaStream_t>(stream);
  return p.is_bf16 ? launch_rows_of<__nv_bfloat16>(p, s) : launch_rows_of<float>(p, s);
}

}  // namespace dsa::topk_select
