// Limits of the streams on a GPU. No torch, no CUDA headers.
#pragma once

namespace dsa::mhc {

inline constexpr int kMaxColumns = 8192;  // phi must fit in the registers of a cluster

}  // namespace dsa::mhc
