// Sizes of the top-k kernels, and how rows are cut.
#pragma once

#include <cstdint>
#include <type_traits>

namespace dsa::topk_select {

inline constexpr int kMaxTopk = 4096;
inline constexpr int kThreads = 512;            // of the largest CTA
inline constexpr int kPiece = 4;                // consecutive entries that a thread takes at a time
inline constexpr int kWarpPiece = 32 * kPiece;  // of its warp
inline constexpr int kReadAhead = 2;            // loads of a warp that reads a run
inline constexpr int kUnit = 8;                 // columns that begin 16-byte aligned, in bf16 too, if their row does
inline constexpr int kMaxCtas = 8;              // of a row: a portable cluster

// A CTA, what it selects among, the digits that it counts, and how many of it an SM is to run.
template <int kThreads_, int kPieces_, int kDigitBits_, int kCtasPerSm_>
struct Shape {
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kPieces = kPieces_;  // that a thread holds at most
  static constexpr int kKeys = kPieces * kPiece;
  static constexpr int kHeld = kThreads * kKeys;
  static constexpr int kDigitBits = kDigitBits_, kBins = 1 << kDigitBits, kBinsOfThread = kBins / kThreads;
  static constexpr int kCtasPerSm = kCtasPerSm_;
};

// Of runs that a CTA holds. Alone, many small CTAs fill each other's gaps; in a cluster the row's time counts.
using HeldShape = Shape<256, 8, 11, 4>;
using HeldClusterShape = Shape<kThreads, 4, 11, 2>;
static_assert(HeldShape::kHeld == HeldClusterShape::kHeld);
inline constexpr int kMaxHeldRun = HeldShape::kHeld;

// Of runs that are filtered. It has room for what stays after a cut and one step more, so the small one is for small
// selections; and for rows that fill the chip, as a lone CTA on an SM should have many warps.
template <bool kSmall>
using FilterShape = std::conditional_t<kSmall, Shape<256, 4, 10, 4>, Shape<kThreads, 4, 11, 2>>;
inline constexpr int kStepPieces = 2;  // that a thread reads at a time
template <class Shape>
inline constexpr int kStep = Shape::kThreads * kStepPieces * kPiece;
template <class Shape>
inline constexpr int kMaxTopkOf = Shape::kHeld - kStep<Shape>;
static_assert(kMaxTopkOf<FilterShape<false>> == kMaxTopk);

// CTAs of one row: as many as there are SMs for all rows, each with a run that is worth its part in a cluster.
constexpr int plan_ctas(int64_t rows, int columns, int num_sms) {
  constexpr int kMinHeldRun = kMaxHeldRun / 2, kMinFilteredRun = 4 * kMaxHeldRun;
  int ctas = 1;
  while (ctas < kMaxCtas && rows * ctas * 2 <= num_sms && columns / (ctas * 2) >= kMinHeldRun) ctas *= 2;
  while (ctas > 1 && columns > kMaxHeldRun * ctas && columns / ctas < kMinFilteredRun) ctas /= 2;
  return ctas;
}

}  // namespace dsa::topk_select
