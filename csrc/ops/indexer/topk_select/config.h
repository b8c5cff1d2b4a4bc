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

// A CTA shape: threads, pieces per thread, bits of a radix digit, CTAs per SM. Grids of at most one CTA for each SM
// have shapes of which an SM takes one; these may form clusters.
template <int kThreads_, int kPieces_, int kDigitBits_, int kCtasPerSm_>
struct Shape {
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kPieces = kPieces_;  // per thread, at most
  static constexpr int kKeys = kPieces * kPiece;
  static constexpr int kHeld = kThreads * kKeys;
  static constexpr int kDigitBits = kDigitBits_, kBins = 1 << kDigitBits, kBinsPerThread = kBins / kThreads;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kIsLone = kCtasPerSm == 1;
};

// For runs that fit into a CTA's registers: of rows that fill the GPU, where many small CTAs hide each other's latency,
// and of few rows, where the latency of a row counts.
using HeldShape = Shape<256, 8, 11, 4>;
template <bool kSmall>
using LoneHeldShape = Shape<kThreads, kSmall ? 4 : 8, 11, 1>;
static_assert(LoneHeldShape<true>::kHeld == HeldShape::kHeld);

// What a CTA holds at most. bf16 rows have ties at the last selected entry, and a thread ranks its ties one after the
// other: so their CTAs hold no more than the small ones.
constexpr int max_held(bool is_bf16) { return is_bf16 ? HeldShape::kHeld : LoneHeldShape<false>::kHeld; }

// For longer runs, which are filtered. It needs room for the topk that stay after a cut plus one step, so the small
// shape is for small topk; and for rows that fill the GPU, because a lone CTA on an SM should have many warps.
template <bool kSmall>
using FilterShape = std::conditional_t<kSmall, Shape<256, 4, 10, 4>, Shape<kThreads, 4, 11, 2>>;
using LoneFilterShape = Shape<kThreads, 4, 11, 1>;
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

// A short row is held by the fewest CTAs that can; for more columns than HeldShape holds, each needs an SM to itself.
// Other rows are filtered by as many as have an SM each, if each one's run is worth its share of the cluster's cost.
// clusters_at_once(n): how many clusters of n CTAs the device runs at once, one CTA an SM: at most SMs / n, and often
// fewer, since the SMs of a cluster are neighbors.
template <class ClustersAtOnce>
constexpr Plan plan_row(int64_t rows, int columns, bool is_bf16, int num_sms, ClustersAtOnce clusters_at_once) {
  constexpr int kMaxHeldRow = 4 * HeldShape::kHeld, kMinRun = HeldShape::kHeld / 2;
  const auto have_sms = [&](int ctas) {
    return rows * ctas <= num_sms && (ctas == 1 || rows <= clusters_at_once(ctas));
  };
  if (columns <= HeldShape::kHeld) return {1, true};
  const int holders = (columns - 1) / max_held(is_bf16) + 1;
  if (columns <= kMaxHeldRow && have_sms(holders)) return {holders, true};
  int ctas = columns < kMaxHeldRow ? 1 : std::min(kMaxCtas, columns / kMinRun);
  while (ctas > 1 && !have_sms(ctas)) --ctas;
  return {ctas, false};
}

}  // namespace dsa::topk_select
