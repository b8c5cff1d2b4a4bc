// The main kernel's launches, by the kind of cache.
#pragma once

#include <cuda_runtime.h>

namespace dsa::sparse_mla_decode {

struct KernelParams;

const char* launch_narrow(const KernelParams& p, cudaStream_t stream);  // packed keys, 16 or 32 heads of an item
const char* launch_wide(const KernelParams& p, cudaStream_t stream);    // packed keys, 64 heads

}  // namespace dsa::sparse_mla_decode
