// The only place that includes torch: LibTorch's stable ABI, argument checks and the current stream.
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

// Only CUDA builds of torch have this function. A strong reference would keep the library from loading on a CPU build.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

// Throws unless `condition` holds; the message is the concatenation of the other arguments. (STD_TORCH_CHECK would put
// this file's path in front.)
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

// One dimension of an expected shape: its letter, and its size unless any size is allowed.
struct Dim {
  const char* letter;
  int64_t size = kAny;

  static constexpr int64_t kAny = -1;
};

// "int64 [1, 4096, 2048]"
std::string describe(const Tensor& tensor);
// "cuda:0"
std::string describe_device(const Tensor& tensor);

// Checks dtype, rank and sizes. `op` is the qualified operator name, `name` the argument's name.
void check_tensor(const char* op, const char* name, const Tensor& tensor, std::initializer_list<ScalarType> dtypes,
                  std::initializer_list<Dim> dims);
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
                         std::initializer_list<Dim> dims) {
  check_tensor(op, name, tensor, {dtype}, dims);
}

// Checks that the last dimension is dense and every row starts 16-byte aligned; an empty tensor always passes.
void check_rows_aligned(const char* op, const char* name, const Tensor& tensor);

// The stride of dimension `dim` of aligned rows [., ., ., columns], for tensor maps: these need multiples of 16 bytes,
// while a view may have any stride in a dimension of size 1, where it is never used.
inline int64_t row_stride(const int64_t* sizes, const int64_t* strides, int dim) {
  return sizes[dim] > 1 ? strides[dim] : sizes[3];
}

// Checks that sm_scale, if given, is finite in fp32, also times log2(e): the kernels use base-2 exponentials.
void check_scale(const char* op, std::optional<double> sm_scale);

// Checks that the last dimension is dense.
void check_last_stride(const char* op, const char* name, const Tensor& tensor);
// Checks that dimension `dim` of a tensor has at most 2^31 - 2^26 positions: kernels go on to the end of a tile, or of
// a step of all threads, in 32 bits.
void check_positions(const char* op, const char* name, const Tensor& tensor, int dim);
// `indices` [.., K], stride 1 in the last dimension, with so many rows and slots that kernels count them in 32 bits.
void check_slots(const char* op, const Tensor& indices);

// Checks that `tensor` is on the device of `other`, the argument named `other_name`.
void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other);

// One call of an operator: makes its device current until the call ends, and knows the stream for its kernels.
class DeviceCall {
 public:
  // Uses the device of the argument `name`, which must be a Hopper GPU.
  DeviceCall(const char* op, const char* name, const Tensor& tensor);

  // torch's current stream on the device, a cudaStream_t.
  void* stream() const;
  // Throws if a launch returned an error text.
  void check(const char* launch_error) const;

  const char* const op;
  const int index, num_sms;  // of the device

 private:
  DeviceGuard guard_;
};

// Uninitialized and contiguous.
Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, int device_index);

// Uninitialized, with the sizes of `tensor` and its dimensions' order in memory, like torch.empty_like.
Tensor empty_like(const Tensor& tensor, int device_index);
// The same, but with a dense last dimension; that of `tensor` must be dense too.
Tensor empty_rows_like(const Tensor& tensor, int device_index);

// Uninitialized fp32 rows that start 16-byte aligned.
Tensor empty_float_rows(int64_t rows, int64_t columns, int device_index);

// `tensor` itself if it is contiguous and starts 16-byte aligned, else a copy that is.
Tensor aligned_contiguous(const Tensor& tensor);

// `tensor` [.., columns] as a matrix of so many rows: a view if one stride steps through all dimensions but the last,
// the last is dense and rows start 16-byte aligned, else a copy.
Tensor as_aligned_rows(const Tensor& tensor, int64_t rows);

}  // namespace dsa
