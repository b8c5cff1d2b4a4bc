// The main kernel's launches, by the kind of cache.
#pragma once

#include <cuda_runtime.h>

namespace dsa::sparse_mla_decode {

struct KernelParams;

const char* launch_narrow(const KernelParams& p, cudaStream_t stream);  // packed keys, at most 32 heads of an item
const char* launch_packed(const KernelParams& p, cudaStream_t stream);
const char* launch_bf16(const KernelParams& p, cudaStream_t stream);

}  // namespace dsa::sparse_mla_decode
