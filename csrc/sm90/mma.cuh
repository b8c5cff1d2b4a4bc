// The matrix products of attention on tiles of 64 keys, through CuTe: layouts of a tile in shared memory, and tiled
// MMAs.
//
// A tile is a row of chunks; a chunk is 64 rows x 64 bf16 columns (8 KB) in the 128-byte swizzle. The same bytes are
// read as keys (columns are the reduction, "K-major") and as values (rows are the reduction, "MN-major").
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace dsa::sm90 {

using Bf16 = cute::bfloat16_t;

inline constexpr int kTileRows = 64;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkElements = kTileRows * kChunkColumns;

// [64 rows, kColumns] of a tile, for products over columns.
template <int kColumns>
using RowsByColumns = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Bf16>{},
                                                   cute::Shape<cute::Int<kTileRows>, cute::Int<kColumns>>{}));

// [64 rows, 16 columns], the operand of one wgmma alone, in the 32-byte swizzle.
using RowsByStep = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW32_Atom<Bf16>{},
                                                cute::Shape<cute::Int<kTileRows>, cute::_16>{}));

// [kColumns, 64 rows] of a tile's bytes, for products over rows.
template <int kColumns>
using ColumnsByRows = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                                   cute::Shape<cute::Int<kColumns>, cute::Int<kTileRows>>{},
                                                   cute::Step<cute::_2, cute::_1>{}));

// [kHeads rows, kColumns] in chunks of kHeads rows.
template <int kHeads, int kColumns>
using HeadsByColumns = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Bf16>{},
                                                    cute::Shape<cute::Int<kHeads>, cute::Int<kColumns>>{}));

// [kColumns, kHeads] of the same bytes, for products over heads.
template <int kColumns, int kHeads>
using ColumnsByHeads = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                                    cute::Shape<cute::Int<kColumns>, cute::Int<kHeads>>{},
                                                    cute::Step<cute::_2, cute::_1>{}));

template <class Atom>
using Tiled = decltype(cute::make_tiled_mma(Atom{}));

// 64 x 64 scores = queries (registers or shared memory) . keys
using ScoreMmaFromRegisters = Tiled<cute::SM90_64x64x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;
using ScoreMmaFromShared = Tiled<cute::SM90_64x64x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::K>>;
// 64 x 256 outputs += probabilities . values
using ValueMma = Tiled<cute::SM90_64x256x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
// 64 x 64 outputs += rows . values, and keys' gradients += transposed probabilities . rows
using NarrowColumnsMma = Tiled<cute::SM90_64x64x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
template <int kColumns>
using TransposedMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
                               cute::GMMA::Major::MN, cute::GMMA::Major::MN>()));
// The same with few heads as columns: 64 keys x heads = keys . queries, and 64 columns x heads += values .
// probabilities
template <int kHeads>
using NarrowScoreMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kHeads>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::K>()));
template <int kHeads>
using NarrowValueMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kHeads>, cute::_16>,
                               cute::GMMA::Major::MN, cute::GMMA::Major::K>()));

// 64 rows x columns += factors of rows and keys (registers) . keys
template <int kColumns>
using RowsMma = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Bf16, Bf16, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

}  // namespace dsa::sm90
