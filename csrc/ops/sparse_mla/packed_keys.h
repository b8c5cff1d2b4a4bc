// Layout of a key packed in fp8: e4m3 of its first columns, their scales in fp32, and the other columns in bf16.
#pragma once

namespace dsa::sparse_mla {

inline constexpr int kPackedColumns = 512;
inline constexpr int kScaleColumns = 128;  // that share a scale
inline constexpr int kScaleGroups = kPackedColumns / kScaleColumns;
inline constexpr int kScaleBytes = kScaleGroups * 4;
inline constexpr int packed_bytes(int d_qk) { return kPackedColumns + kScaleBytes + 2 * (d_qk - kPackedColumns); }

}  // namespace dsa::sparse_mla
