// Host side of a kernel launch. Calls the driver's entry points directly and looks them up once, because the launch is
// most of the host time of a small call.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace dsa::sm90 {

// libcuda is not linked: the runtime looks its functions up in the installed driver. Null when the driver lacks one.
template <class Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<Function>(entry);
}

// The number of CTAs of a launch and of each cluster.
struct Grid {
  unsigned ctas, cluster = 1;
  bool programmatic = false;  // programmatic dependent launch (PDL), see programmatic.cuh

  constexpr Grid(unsigned ctas, unsigned cluster = 1, bool programmatic = false)
      : ctas(ctas), cluster(cluster), programmatic(programmatic) {}
};

// Shared memory that a kernel may use without an attribute; a kernel that needs more must need the same at every
// launch.
inline constexpr int kSharedBytesByDefault = 48 * 1024, kMaxSharedBytes = 227 * 1024;

inline constexpr int kMaxDevices = 64;       // for which loaded kernels are cached
inline constexpr unsigned kMaxCluster = 16;  // in CTAs; more than 8 only if the device has room for them

// The driver's launch configuration.
struct LaunchConfig {
  CUlaunchAttribute attributes[2]{};
  CUlaunchConfig config;

  LaunchConfig(Grid grid, dim3 threads, int shared_bytes, cudaStream_t stream)
      : config{
            .gridDimX = grid.ctas,
            .gridDimY = 1,
            .gridDimZ = 1,
            .blockDimX = threads.x,
            .blockDimY = threads.y,
            .blockDimZ = threads.z,
            .sharedMemBytes = static_cast<unsigned>(shared_bytes),
            .hStream = stream,
            .attrs = attributes,
            .numAttrs = 0,
        } {
    if (grid.cluster > 1) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {grid.cluster, 1, 1};
    }
    if (grid.programmatic) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;  // `config` points to `attributes`
};

// `kKernel` as a driver handle, loaded once per device, with the attributes that large shared memory and clusters need.
// Returns null, or a text that says what failed.
template <auto kKernel>
const char* load_kernel(int device, bool in_clusters, int shared_bytes, cudaFunction_t* function) {
  static std::array<std::atomic<cudaFunction_t>, kMaxDevices> loaded{};
  *function = loaded[device % kMaxDevices].load(std::memory_order_relaxed);
  if (*function != nullptr) return nullptr;
  const auto symbol = reinterpret_cast<const void*>(kKernel);
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kSharedBytesByDefault) {
    error = cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess && in_clusters) {
    error = cudaFuncSetAttribute(symbol, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) error = cudaGetFuncBySymbol(function, symbol);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  loaded[device % kMaxDevices].store(*function, std::memory_order_relaxed);
  return nullptr;
}

// Launches `kKernel` on `device`, which must be the current one. Returns null, or a text that says what failed.
template <auto kKernel, class... Args>
const char* launch_kernel(int device, Grid grid, dim3 threads, int shared_bytes, cudaStream_t stream,
                          const Args&... args) {
  cudaFunction_t function;
  const char* error = load_kernel<kKernel>(device, grid.cluster > 1, shared_bytes, &function);
  if (error != nullptr) return error;
  static const auto launch = driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (launch == nullptr) return "the driver has no cuLaunchKernelEx";
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  const LaunchConfig launched(grid, threads, shared_bytes, stream);
  const CUresult result = launch(&launched.config, function, pointers, nullptr);
  // The runtime's error codes equal the driver's.
  return result == CUDA_SUCCESS ? nullptr : cudaGetErrorString(static_cast<cudaError_t>(result));
}

// Counts how many clusters of `cluster` CTAs the device can run at once. Returns null, or a text that says what failed.
template <auto kKernel>
const char* count_clusters(int device, unsigned cluster, dim3 threads, int shared_bytes, int* clusters) {
  cudaFunction_t function;
  const char* error = load_kernel<kKernel>(device, true, shared_bytes, &function);
  if (error != nullptr) return error;
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, kMaxDevices> counted{};
  auto& known = counted[device % kMaxDevices][cluster];
  *clusters = known.load(std::memory_order_relaxed);
  if (*clusters > 0) return nullptr;
  static const auto count = driver_function<decltype(&cuOccupancyMaxActiveClusters)>("cuOccupancyMaxActiveClusters");
  if (count == nullptr) return "the driver has no cuOccupancyMaxActiveClusters";
  const LaunchConfig launched(Grid(cluster, cluster), threads, shared_bytes, nullptr);
  const CUresult result = count(clusters, function, &launched.config);
  if (result != CUDA_SUCCESS) return cudaGetErrorString(static_cast<cudaError_t>(result));
  if (*clusters == 0) return "the device has no room for a cluster of this kernel";
  known.store(*clusters, std::memory_order_relaxed);
  return nullptr;
}

}  // namespace dsa::sm90
