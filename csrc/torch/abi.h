// The one door to torch: LibTorch's stable ABI, argument checks and the current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

// Only CUDA builds of torch have this function. A strong reference would keep the library from
// loading on a CPU torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

// Fails with the text that the arguments after the condition make when written one after another.
// (STD_TORCH_CHECK would put this file's path in front.)
#define DSA_CHECK(condition, ...)                                            \
  do {                                                                       \
    if (__builtin_expect(!(condition), 0)) ::dsa::detail::fail(__VA_ARGS__); \
  } while (false)

namespace dsa {

using torch::headeronly::ScalarType;
using torch::stable::contiguous, torch::stable::fill_, torch::stable::transpose, torch::stable::view,
    torch::stable::zero_;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

namespace detail {

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace detail

// One dimension of an expected shape: its letter, and its size unless any will do.
struct Dim {
  const char* letter;
  int64_t size = kAny;

  static constexpr int64_t kAny = -1;
};

// "int64 [1, 4096, 2048]"
std::string describe(const Tensor& tensor);
// "cuda:0"
std::string describe_device(const Tensor& tensor);

// Checks dtype, rank and sizes. `op` is the qualified name of the operator, `name` that of the
// argument.
void check_tensor(const char* op, const char* name, const Tensor& tensor, std::initializer_list<ScalarType> dtypes,
                  std::initializer_list<Dim> dims);
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
                         std::initializer_list<Dim> dims) {
  check_tensor(op, name, tensor, {dtype}, dims);
}

// Checks that every row of the last dimension is dense and starts 16-byte aligned, if there are elements.
void check_rows_aligned(const char* op, const char* name, const Tensor& tensor);

// The stride of dimension `dim` of such rows [., ., ., columns], for tensor maps: they want multiples of 16 bytes,
// while views leave anything in a dimension of one element, whose stride is never used to step.
inline int64_t row_stride(const int64_t* sizes, const int64_t* strides, int dim) {
  return sizes[dim] > 1 ? strides[dim] : sizes[3];
}

// Checks that a scale of scores, if there is one, is finite in fp32, also times log2(e): exponentials are of base 2.
void check_scale(const char* op, std::optional<double> sm_scale);

// Checks that the last dimension is dense.
void check_last_stride(const char* op, const char* name, const Tensor& tensor);

// Checks that `tensor` is on the device of `other`, which is the argument `other_name`.
void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other);

// One call of an operator: its device, which is current until the call ends, and its kernels' stream.
class DeviceCall {
 public:
  // On the device of the argument `name`, which must be a Hopper GPU.
  DeviceCall(const char* op, const char* name, const Tensor& tensor);

  // The current stream of torch on the device, a cudaStream_t.
  void* stream() const;
  // Fails if a launch returned a text, which says what failed.
  void check(const char* launch_error) const;

  const char* const op;
  const int index, num_sms;  // of the device

 private:
  DeviceGuard guard_;
};

// Uninitialised and contiguous.
Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, int device_index);

// Uninitialised, of the sizes of `tensor` and in the order in memory that its dimensions have, as torch.empty_like.
Tensor empty_like(const Tensor& tensor, int device_index);
// The same, but for rows of the last dimension, which are dense as those of `tensor` must be.
Tensor empty_rows_like(const Tensor& tensor, int device_index);

// Uninitialised fp32 rows that start 16-byte aligned.
Tensor empty_float_rows(int64_t rows, int64_t columns, int device_index);

// `tensor` itself where it is contiguous and starts 16-byte aligned, else a copy that is.
Tensor aligned_contiguous(const Tensor& tensor);

}  // namespace dsa
