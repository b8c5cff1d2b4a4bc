// RoPE: rotates the pairs of some adjacent columns of each row, and copies the others.
//
// A thread has four pairs of a row: 16 bytes that lie together if the pairs are interleaved, or else 8 bytes of the
// first columns of the pairs and 8 of the second ones. Of the columns that are copied it has 16 bytes.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "params.h"
#include "sm90/matrix_copy.cuh"

namespace dsa::write_rotated {

inline constexpr int kThreads = 256, kPairs = 4, kCopied = 8;  // pairs and columns of a thread

struct KernelParams : Params {
  explicit KernelParams(const Params& p)
      : Params(p),
        rotating(p.pairs / kPairs),
        pieces(rotating + (p.columns - 2 * p.pairs) / kCopied),
        by_piece(pieces),
        by_head(p.heads),
        by_position(p.positions) {}

  int rotating, pieces;  // threads of a row that rotate, and all
  cutlass::FastDivmod by_piece, by_head, by_position;
};

struct Place {
  int b, s, h;

  __device__ __forceinline__ uint16_t* in(const Rows& rows) const {
    return static_cast<uint16_t*>(rows.data) + b * rows.stride_b + s * rows.stride_s + h * rows.stride_h;
  }
};

// The first columns of four pairs, and the second ones; each word has those of two pairs.
struct Pairs {
  uint2 first, second;
};

__device__ __forceinline__ uint2& words(uint16_t* columns) { return *reinterpret_cast<uint2*>(columns); }

__device__ __forceinline__ Pairs load(uint16_t* row, int pair, int pairs, bool interleaved) {
  if (!interleaved) return {words(row + pair), words(row + pairs + pair)};
  const uint4 w = *reinterpret_cast<const uint4*>(row + 2 * pair);
  constexpr int kLow = 0x5410, kHigh = 0x7632;
  return {{__byte_perm(w.x, w.y, kLow), __byte_perm(w.z, w.w, kLow)},
          {__byte_perm(w.x, w.y, kHigh), __byte_perm(w.z, w.w, kHigh)}};
}

__device__ __forceinline__ void store(uint16_t* row, int pair, int pairs, bool interleaved, const Pairs& p) {
  if (!interleaved) {
    words(row + pair) = p.first, words(row + pairs + pair) = p.second;
    return;
  }
  constexpr int kLow = 0x5410, kHigh = 0x7632;
  *reinterpret_cast<uint4*>(row + 2 * pair) = {
      __byte_perm(p.first.x, p.second.x, kLow), __byte_perm(p.first.x, p.second.x, kHigh),
      __byte_perm(p.first.y, p.second.y, kLow), __byte_perm(p.first.y, p.second.y, kHigh)};
}

// a * c + b * s of two pairs. The first product is rounded to bf16, as torch.mul and addcmul round.
__device__ __forceinline__ uint32_t combine(uint32_t a, uint32_t c, uint32_t b, uint32_t s, float sign) {
  const float2 fa = sm90::unpack_bf16(a), fc = sm90::unpack_bf16(c), fb = sm90::unpack_bf16(b),
               fs = sm90::unpack_bf16(s);
  const float2 product = sm90::unpack_bf16(sm90::pack_bf16(fa.x * fc.x, fa.y * fc.y));
  return sm90::pack_bf16(fmaf(sign * fb.x, fs.x, product.x), fmaf(sign * fb.y, fs.y, product.y));
}

__global__ void __launch_bounds__(kThreads) write_rotated_kernel(const __grid_constant__ KernelParams p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.rows * p.pieces) return;
  Place place;
  int piece, row;
  p.by_piece(row, piece, int(index));
  p.by_head(row, place.h, row);
  p.by_position(place.b, place.s, row);
  uint16_t *g_x = place.in(p.x), *g_out = place.in(p.out);
  if (piece >= p.rotating) {
    int column = (piece - p.rotating) * kCopied;
    if (column >= p.first) column += 2 * p.pairs;
    *reinterpret_cast<uint4*>(g_out + column) = *reinterpret_cast<const uint4*>(g_x + column);
    return;
  }
  g_x += p.first, g_out += p.first;
  const int pair = piece * kPairs;
  const Pairs x = load(g_x, pair, p.pairs, p.interleaved);
  const uint2 c = words(place.in(p.cos) + pair), s = words(place.in(p.sin) + pair);
  Pairs out;
  out.first = {combine(x.first.x, c.x, x.second.x, s.x, -1.f), combine(x.first.y, c.y, x.second.y, s.y, -1.f)};
  out.second = {combine(x.second.x, c.x, x.first.x, s.x, 1.f), combine(x.second.y, c.y, x.first.y, s.y, 1.f)};
  store(g_out, pair, p.pairs, p.interleaved_out, out);
}

}  // namespace dsa::write_rotated
