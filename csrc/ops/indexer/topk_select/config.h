// CTA shapes of the top-k kernels, and how rows are split over CTAs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace dsa::topk_select {

inline constexpr int kMaxTopk = 4096;
inline constexpr int kThreads = 512;            // of the largest CTA
inline constexpr int kPiece = 4;                // consecutive entries of a thread
inline constexpr int kWarpPiece = 32 * kPiece;  // per warp
inline constexpr int kUnit = 8;                 // columns: a unit is 16-byte aligned, in bf16 too, if its row is
inline constexpr int kMaxCtas = 8;              // per row: the largest portable cluster

// A CTA shape: threads, pieces per thread, bits of a radix digit, CTAs per SM, and whether CTAs may form clusters.
template <int kThreads_, int kPieces_, int kDigitBits_, int kCtasPerSm_, bool kMayFormClusters_ = false>
struct Shape {
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kPieces = kPieces_;  // per thread, at most
  static constexpr int kKeys = kPieces * kPiece;
  static constexpr int kHeld = kThreads * kKeys;
  static constexpr int kDigitBits = kDigitBits_, kBins = 1 << kDigitBits, kBinsPerThread = kBins / kThreads;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kMayFormClusters = kMayFormClusters_;
};

// For runs that fit into a CTA's registers. Without a cluster, many small CTAs hide each other's latency; in a cluster
// the latency of a row counts.
using HeldShape = Shape<256, 8, 11, 4>;
using HeldClusterShape = Shape<kThreads, 4, 11, 2, true>;
static_assert(HeldShape::kHeld == HeldClusterShape::kHeld);
inline constexpr int kMaxHeldRun = HeldShape::kHeld;

// For longer runs, which are filtered. It needs room for the topk that stay after a cut plus one step, so the small
// shape is for small topk; and for rows that fill the GPU, because a lone CTA on an SM should have many warps.
template <bool kSmall>
using FilterShape = std::conditional_t<kSmall, Shape<256, 4, 10, 4>, Shape<kThreads, 4, 11, 2>>;
// For grids of at most one CTA for each SM, which has no room for two.
using LoneFilterShape = Shape<kThreads, 4, 11, 1, true>;
inline constexpr int kLongRow = 48 * 1024;  // columns; from here on the sample of a small shape is larger
inline constexpr int kStepPieces = 2;       // that a thread reads at a time if all warps read together
template <class Shape>
inline constexpr int kStep = Shape::kThreads * kStepPieces * kPiece;
template <class Shape>
inline constexpr int kMaxTopkOf = Shape::kHeld - kStep<Shape>;
static_assert(kMaxTopkOf<FilterShape<false>> == kMaxTopk);

// How the CTAs that share a row process it.
struct Plan {
  int ctas;   // per row
  bool held;  // in registers; else it is filtered
};

// A row that the registers of at most kMaxHolders CTAs hold is held by the fewest that can, if there is an SM for each
// CTA of all rows; one CTA needs no SM to itself. Other rows are filtered by as many as have an SM each, if each one's
// run is worth its share of the cluster's cost. clusters_at_once(n): how many clusters of n CTAs the device runs at
// once, one CTA an SM: at most SMs / n, and often fewer, since the SMs of a cluster are neighbors.
template <class ClustersAtOnce>
constexpr Plan plan_row(int64_t rows, int columns, int num_sms, ClustersAtOnce clusters_at_once) {
  constexpr int kMaxHolders = 4, kMinRun = kMaxHeldRun / 2, kMinShared = 4 * kMaxHeldRun;
  const int holders = std::max(1, (columns - 1) / kMaxHeldRun + 1);
  if (holders == 1 || (holders <= kMaxHolders && rows * holders <= num_sms)) return {holders, true};
  int ctas = columns < kMinShared ? 1 : std::min(kMaxCtas, columns / kMinRun);
  while (ctas > 1 && (rows > num_sms / ctas || rows > clusters_at_once(ctas))) --ctas;
  return {ctas, false};
}

}  // namespace dsa::topk_select
