// Host side of a kernel launch: the driver's own entry points, found once, because the host's time for a small call is
// mostly the launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace dsa::sm90 {

// libcuda is not linked: the runtime finds its functions in the driver that is there. Null when it has none such.
template <class Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<Function>(entry);
}

// How many CTAs, in clusters of how many.
struct Grid {
  unsigned ctas, cluster = 1;
  bool starts_early = false;  // while the kernel before runs, for which it then waits (programmatic.cuh)

  constexpr Grid(unsigned ctas, unsigned cluster = 1, bool starts_early = false)
      : ctas(ctas), cluster(cluster), starts_early(starts_early) {}
};

// What a kernel may use without being asked for; more must be the same at each launch.
inline constexpr int kSharedBytesByDefault = 48 * 1024, kMaxSharedBytes = 227 * 1024;

// Launches `kKernel` on `device`, which is current. Returns null, or a text that says what failed.
template <auto kKernel, class... Args>
const char* launch_kernel(int device, Grid grid, dim3 threads, int shared_bytes, cudaStream_t stream,
                          const Args&... args) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<cudaFunction_t>, kMaxDevices> loaded{};
  cudaFunction_t function = loaded[device % kMaxDevices].load(std::memory_order_relaxed);
  if (function == nullptr) {
    const auto symbol = reinterpret_cast<const void*>(kKernel);
    cudaError_t error = cudaSuccess;
    if (shared_bytes > kSharedBytesByDefault) {
      error = cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    if (error == cudaSuccess) error = cudaGetFuncBySymbol(&function, symbol);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    loaded[device % kMaxDevices].store(function, std::memory_order_relaxed);
  }
  static const auto launch = driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (launch == nullptr) return "the driver has no cuLaunchKernelEx";
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  CUlaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (grid.cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {grid.cluster, 1, 1};
  }
  if (grid.starts_early) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  const CUlaunchConfig config{
      .gridDimX = grid.ctas,
      .gridDimY = 1,
      .gridDimZ = 1,
      .blockDimX = threads.x,
      .blockDimY = threads.y,
      .blockDimZ = threads.z,
      .sharedMemBytes = static_cast<unsigned>(shared_bytes),
      .hStream = stream,
      .attrs = attributes,
      .numAttrs = count,
  };
  const CUresult result = launch(&config, function, pointers, nullptr);
  // The runtime's error codes are the driver's.
  return result == CUDA_SUCCESS ? nullptr : cudaGetErrorString(static_cast<cudaError_t>(result));
}

}  // namespace dsa::sm90
