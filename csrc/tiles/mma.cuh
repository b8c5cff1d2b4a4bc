// The matrix products of attention on tiles of 64 keys, with CuTe: shared-memory layouts of a tile, and tiled MMAs.
//
// A tile is a row of chunks; a chunk is 64 rows x 64 bf16 columns (8 KB) in the 128-byte swizzle. The same bytes are
// read as keys (the product reduces over columns, "K-major") and as values (it reduces over rows, "MN-major").
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace dsa::tiles {

using Bf16 = cute::bfloat16_t;

inline constexpr int kTileRows = 64;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkElements = kTileRows * kChunkColumns;

// [64 rows, kColumns] of a tile, for products that reduce over columns.
template <int kColumns>
using RowsByColumns = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Bf16>{},
                                                   cute::Shape<cute::Int<kTileRows>, cute::Int<kColumns>>{}));

// [64 rows, 16 columns], the operand of a single wgmma, in the 32-byte swizzle.
using RowsByStep = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW32_Atom<Bf16>{},
                                                cute::Shape<cute::Int<kTileRows>, cute::_16>{}));

// [kColumns, 64 rows], the same bytes for products that reduce over rows.
template <int kColumns>
using ColumnsByRows = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                                   cute::Shape<cute::Int<kColumns>, cute::Int<kTileRows>>{},
                                                   cute::Step<cute::_2, cute::_1>{}));

// [kHeads rows, kColumns], in chunks of kHeads rows.
template <int kHeads, int kColumns>
using HeadsByColumns = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Bf16>{},
                                                    cute::Shape<cute::Int<kHeads>, cute::Int<kColumns>>{}));

// [kColumns, kHeads], the same bytes for products that reduce over heads.
template <int kColumns, int kHeads>
using ColumnsByHeads = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                                    cute::Shape<cute::Int<kColumns>, cute::Int<kHeads>>{},
                                                    cute::Step<cute::_2, cute::_1>{}));

template <class Atom>
using Tiled = decltype(cute::make_tiled_mma(Atom{}));

// S [64 x 64] = Q (registers or shared memory) K^T
using ScoreMmaFromRegisters = Tiled<cute::SM90_64x64x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;
using ScoreMmaFromShared = Tiled<cute::SM90_64x64x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;
// O [64 x 256] += P V
using ValueMma = Tiled<cute::SM90_64x256x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
// O [64 x 64] += A V, and gradients of keys: dK [64 x columns] += A^T B
using NarrowColumnsMma = Tiled<cute::SM90_64x64x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
template <int kColumns>
using TransposedMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
                               cute::GMMA::Major::MN, cute::GMMA::Major::MN>()));
// With few heads as columns: S^T [64 keys x heads] = K Q^T, and O^T [64 columns x heads] += V^T P^T
template <int kHeads>
using NarrowScoreMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kHeads>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::K>()));
template <int kHeads>
using NarrowValueMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kHeads>, cute::_16>,
                               cute::GMMA::Major::MN, cute::GMMA::Major::K>()));

// [64 x columns] += A (registers) K, for example dQ = dS K
template <int kColumns>
using RowsMma = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

// An operand of one wgmma: step k of the last mode, 16 columns of bf16 or 32 of e4m3.
template <class Operand>
__device__ __forceinline__ auto step_of(const Operand& r, int k) {
  if constexpr (Operand::rank == 2) {
    return r(cute::_, k);
  } else {
    return r(cute::_, cute::_, k);
  }
}

// C += A B over all steps, or C = A B if the MMA does not accumulate yet.
template <class Mma, class A, class B, class C>
__device__ __forceinline__ void multiply_add(Mma& mma, const A& r_a, const B& r_b, C&& r_c) {
#pragma unroll
  for (int k = 0; k < cute::size<A::rank - 1>(r_a); ++k) {
    cute::gemm(mma, step_of(r_a, k), step_of(r_b, k), r_c);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
}

// C = A B
template <class Mma, class A, class B, class C>
__device__ __forceinline__ void multiply(Mma& mma, const A& r_a, const B& r_b, C&& r_c) {
  mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
  multiply_add(mma, r_a, r_b, r_c);
}

}  // namespace dsa::tiles
