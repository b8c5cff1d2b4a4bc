#include "torch/abi.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "torch/strides.h"

namespace dsa {
namespace {

constexpr int64_t kRowAlignment = 16;  // bytes: required by cp.async and tensor maps
constexpr int kMaxDims = 5;

// The dtype names of Python.
std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default: {
      std::string name = torch::headeronly::toString(dtype);
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      return name;
    }
  }
}

std::string dtype_names(std::initializer_list<ScalarType> dtypes) {
  std::string names;
  for (ScalarType dtype : dtypes) names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  return names;
}

int32_t device_type(const Tensor& tensor) {
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

std::string expected_shape(std::initializer_list<Dim> dims, bool with_sizes) {
  std::string text = "[";
  for (const Dim& dim : dims) {
    if (text.size() > 1) text += ", ";
    text += dim.letter;
    if (with_sizes && dim.size != Dim::kAny) text += "=" + std::to_string(dim.size);
  }
  return text + "]";
}

std::string describe_sizes(const int64_t* sizes, int64_t dims) {
  std::string text = "[";
  for (int64_t i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, ScalarType dtype, int device_index) {
  const int32_t shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  // The call returns only a failure flag; PyTorch writes the message to stderr. Sizes were checked, so memory ran out.
  const int32_t cuda = aoti_torch_device_type_cuda();
  const bool failed = aoti_torch_empty_strided(dims, sizes, strides, shim_dtype, cuda, device_index, &handle);
  DSA_CHECK(!failed, "CUDA out of memory: no room for ", dtype_name(dtype), " ", describe_sizes(sizes, dims),
            " on cuda:", device_index);
  return Tensor(handle);
}

struct Device {
  int capability;  // 90 for sm_90
  int num_sms;
};

// Read once per device and kept for the life of the process.
Device device_info(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int64_t>, kMaxDevices> cache{};  // capability << 32 | SM count; 0 = not read yet
  DSA_CHECK(index >= 0 && index < kMaxDevices, "dsa: expected a CUDA device index below ", kMaxDevices, ", got ",
            index);
  int64_t packed = cache[index].load(std::memory_order_relaxed);
  if (packed == 0) {
    int major = 0, minor = 0, num_sms = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index);
    DSA_CHECK(error == cudaSuccess, "dsa: cannot read the properties of cuda:", index, ": ", cudaGetErrorString(error));
    packed = static_cast<int64_t>(major * 10 + minor) << 32 | num_sms;
    cache[index].store(packed, std::memory_order_relaxed);
  }
  return {static_cast<int>(packed >> 32), static_cast<int>(packed & INT32_MAX)};
}

int hopper_sms(const char* op, const char* name, const Tensor& tensor) {
  DSA_CHECK(tensor.is_cuda(), op, ": ", name, " must be on a CUDA device, got ", describe_device(tensor));
  const auto [capability, num_sms] = device_info(tensor.get_device_index());
  DSA_CHECK(capability == 90, op, ": needs a Hopper GPU (sm_90), got sm_", capability, " on ", describe_device(tensor));
  return num_sms;
}

}  // namespace

std::string describe(const Tensor& tensor) {
  return dtype_name(tensor.scalar_type()) + " " + describe_sizes(tensor.sizes().data(), tensor.dim());
}

std::string describe_device(const Tensor& tensor) {
  const int32_t type = device_type(tensor);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  const std::string name = type == aoti_torch_device_type_cuda() ? "cuda" : "device type " + std::to_string(type);
  return name + ":" + std::to_string(tensor.get_device_index());
}

void check_tensor(const char* op, const char* name, const Tensor& tensor, std::initializer_list<ScalarType> dtypes,
                  std::initializer_list<Dim> dims) {
  const bool known = std::find(dtypes.begin(), dtypes.end(), tensor.scalar_type()) != dtypes.end();
  DSA_CHECK(known && tensor.dim() == static_cast<int64_t>(dims.size()), op, ": ", name, " must be ",
            dtype_names(dtypes), " ", expected_shape(dims, false), ", got ", describe(tensor));
  const int64_t* sizes = tensor.sizes().data();
  for (const Dim& dim : dims) {
    const int64_t size = *sizes++;
    DSA_CHECK(dim.size == Dim::kAny || size == dim.size, op, ": ", name, " must be ", dtype_names(dtypes), " ",
              expected_shape(dims, true), ", got ", describe(tensor));
    DSA_CHECK(size <= INT32_MAX, op, ": ", name, " must have sizes below 2^31, got ", describe(tensor));
  }
}

void check_last_stride(const char* op, const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  DSA_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1, op, ": ", name,
            " must have stride 1 in its last dimension, got stride ", tensor.stride(last));
}

void check_positions(const char* op, const char* name, const Tensor& tensor, int dim) {
  constexpr int64_t kMax = (int64_t{1} << 31) - (int64_t{1} << 26);
  DSA_CHECK(tensor.size(dim) <= kMax, op, ": ", name, " must have at most 2^31 - 2^26 ", dim == 0 ? "rows" : "columns",
            ", got ", describe(tensor));
}

void check_slots(const char* op, const Tensor& indices) {
  constexpr int64_t kMaxRows = int64_t{1} << 30, kMaxSlots = int64_t{1} << 29;
  check_last_stride(op, "indices", indices);
  const auto sizes = indices.sizes();
  bool is_small = sizes.back() <= kMaxSlots;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size() && is_small; ++i) is_small = (rows *= sizes[i]) <= kMaxRows;
  DSA_CHECK(is_small || indices.numel() == 0, op, ": indices must have at most 2^30 rows of at most 2^29 slots, got ",
            describe(indices));
}

void check_rows_aligned(const char* op, const char* name, const Tensor& tensor) {
  check_last_stride(op, name, tensor);
  if (tensor.numel() == 0) return;
  const int64_t elements = kRowAlignment / static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    DSA_CHECK(sizes[i] <= 1 || strides[i] % elements == 0, op, ": ", name,
              " must have rows that start 16-byte aligned: strides in multiples of ", elements,
              " elements, got stride ", strides[i], " in dimension ", i);
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  DSA_CHECK(address % kRowAlignment == 0, op, ": ", name, " must start 16-byte aligned, got an address that is ",
            address % kRowAlignment, " bytes past a multiple of 16");
}

void check_scale(const char* op, std::optional<double> sm_scale) {
  constexpr double kLargest = 0x1p127;
  DSA_CHECK(!sm_scale || std::abs(*sm_scale) <= kLargest, op, ": sm_scale must be from -2^127 to 2^127, got ",
            *sm_scale);
}

void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other) {
  DSA_CHECK(tensor.get_device_index() == other.get_device_index() && device_type(tensor) == device_type(other), op,
            ": ", name, " must be on the device of ", other_name, ", ", describe_device(other), ", got ",
            describe_device(tensor));
}

DeviceCall::DeviceCall(const char* op, const char* name, const Tensor& tensor)
    : op(op), index(tensor.get_device_index()), num_sms(hopper_sms(op, name, tensor)), guard_(index) {}

void* DeviceCall::stream() const {
  DSA_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "dsa: this build of torch has no CUDA streams");
  // The driver's entry points need a current context, which the runtime creates at a thread's first runtime call.
  static thread_local int bound_device = -1;
  if (bound_device != index) {
    const cudaError_t error = cudaSetDevice(index);
    DSA_CHECK(error == cudaSuccess, "dsa: cannot use cuda:", index, ": ", cudaGetErrorString(error));
    bound_device = index;
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return stream;
}

void DeviceCall::check(const char* launch_error) const {
  DSA_CHECK(launch_error == nullptr, op, ": launch failed: ", launch_error);
}

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, int device_index) {
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(), dtype, device_index);
}

Tensor empty_like(const Tensor& tensor, int device_index) {
  std::array<int64_t, kMaxDims> strides{};
  const auto sizes = tensor.sizes();
  dense_strides(static_cast<int>(sizes.size()), sizes.data(), tensor.strides().data(), strides.data());
  return empty_strided(tensor.dim(), sizes.data(), strides.data(), tensor.scalar_type(), device_index);
}

Tensor empty_rows_like(const Tensor& tensor, int device_index) {
  std::array<int64_t, kMaxDims> strides{};
  const auto sizes = tensor.sizes();
  dense_row_strides(static_cast<int>(sizes.size()), sizes.data(), tensor.strides().data(), strides.data());
  return empty_strided(tensor.dim(), sizes.data(), strides.data(), tensor.scalar_type(), device_index);
}

Tensor empty_float_rows(int64_t rows, int64_t columns, int device_index) {
  constexpr int64_t kElements = kRowAlignment / sizeof(float);
  const int64_t sizes[] = {rows, columns};
  const int64_t strides[] = {(columns + kElements - 1) / kElements * kElements, 1};
  return empty_strided(2, sizes, strides, ScalarType::Float, device_index);
}

Tensor aligned_contiguous(const Tensor& tensor) {
  const Tensor dense = torch::stable::contiguous(tensor);
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % kRowAlignment == 0 ? dense : torch::stable::clone(dense);
}

Tensor as_aligned_rows(const Tensor& tensor, int64_t rows) {
  const int last = static_cast<int>(tensor.dim()) - 1;
  const int64_t elements = kRowAlignment / static_cast<int64_t>(tensor.element_size());
  bool fits = tensor.stride(last) == 1 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kRowAlignment == 0;
  std::optional<int64_t> step;  // required of the next outer dimension
  for (int dim = last - 1; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    fits &= (!step || tensor.stride(dim) == *step) && tensor.stride(dim) % elements == 0;
    step = tensor.stride(dim) * tensor.size(dim);
  }
  const int64_t sizes[] = {rows, tensor.size(last)};
  return view(fits ? tensor : aligned_contiguous(tensor), {sizes, 2});
}

}  // namespace dsa
