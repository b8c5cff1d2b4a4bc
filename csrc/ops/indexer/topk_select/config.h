// CTA shapes of the top-k kernels, and how rows are split over CTAs.
#pragma once

#include <cstdint>
#include <type_traits>

namespace dsa::topk_select {

inline constexpr int kMaxTopk = 4096;
inline constexpr int kThreads = 512;            // of the largest CTA
inline constexpr int kPiece = 4;                // consecutive entries that a thread takes at a time
inline constexpr int kWarpPiece = 32 * kPiece;  // per warp
inline constexpr int kReadAhead = 2;            // loads that a warp has in flight while it reads a run
inline constexpr int kUnit = 8;                 // columns: a unit is 16-byte aligned, in bf16 too, if its row is
inline constexpr int kMaxCtas = 8;              // per row: the largest portable cluster

// A CTA shape: threads, pieces per thread, bits of a radix digit, and CTAs per SM.
template <int kThreads_, int kPieces_, int kDigitBits_, int kCtasPerSm_>
struct Shape {
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kPieces = kPieces_;  // per thread, at most
  static constexpr int kKeys = kPieces * kPiece;
  static constexpr int kHeld = kThreads * kKeys;
  static constexpr int kDigitBits = kDigitBits_, kBins = 1 << kDigitBits, kBinsPerThread = kBins / kThreads;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kMayFormClusters = kThreads == topk_select::kThreads;  // see launch_rows_of
};

// For runs that fit into a CTA's registers. Without a cluster, many small CTAs hide each other's latency; in a cluster
// the latency of a row counts.
using HeldShape = Shape<256, 8, 11, 4>;
using HeldClusterShape = Shape<kThreads, 4, 11, 2>;
static_assert(HeldShape::kHeld == HeldClusterShape::kHeld);
inline constexpr int kMaxHeldRun = HeldShape::kHeld;

// For longer runs, which are filtered. It needs room for the topk that stay after a cut plus one step, so the small
// shape is for small topk; and for rows that fill the GPU, because a lone CTA on an SM should have many warps.
template <bool kSmall>
using FilterShape = std::conditional_t<kSmall, Shape<256, 4, 10, 4>, Shape<kThreads, 4, 11, 2>>;
// For grids of at most one CTA for each SM: launch_filter pads shared memory so that no SM takes two.
using LoneFilterShape = Shape<kThreads, 4, 11, 1>;
inline constexpr int kStepPieces = 2;  // that a thread reads at a time
template <class Shape>
inline constexpr int kStep = Shape::kThreads * kStepPieces * kPiece;
template <class Shape>
inline constexpr int kMaxTopkOf = Shape::kHeld - kStep<Shape>;
static_assert(kMaxTopkOf<FilterShape<false>> == kMaxTopk);

// The longest row that `ctas` CTAs hold. Eight filter faster than they select together what they hold.
constexpr int max_held_columns(int ctas) { return ctas == kMaxCtas ? 0 : kMaxHeldRun * ctas; }

// CTAs per row: as many as there are SMs for all rows, if each one's run is worth its share of the cluster's cost. Two
// that filter save half of the reading only.
constexpr int plan_ctas(int64_t rows, int columns, int num_sms) {
  constexpr int kMinRun = kMaxHeldRun / 2, kMinFilteredByTwo = 8 * kMaxHeldRun;
  int ctas = 1;
  while (ctas < kMaxCtas && rows * ctas * 2 <= num_sms && columns / (ctas * 2) >= kMinRun) ctas *= 2;
  return ctas == 2 && columns > max_held_columns(2) && columns < kMinFilteredByTwo ? 1 : ctas;
}

}  // namespace dsa::topk_select
