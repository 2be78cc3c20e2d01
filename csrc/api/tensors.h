// The only header that knows torch: tensors in, plain views out.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "launch/error.h"
#include "params/tensor_view.h"

namespace flash::api {

// An operand whose text is a tensor's dtype. The text of a tensor itself is its shape.
struct DtypeOf {
  torch::stable::Tensor const& t;
};

inline std::string operand_text(DtypeOf const& x) {
  return torch::headeronly::toString(x.t.scalar_type());
}
inline std::string operand_text(torch::stable::Tensor const& t) {
  std::string text;
  for (int64_t i = 0; i < t.dim(); ++i) {
    text += concat(i > 0 ? ", " : "", t.size(i));
  }
  return concat("(", text, ")");
}
template <class T>
T const& operand_text(T const& x) {
  return x;
}

// Throws unless `served`. code: a row of the table in flash_attn/api/refusals.py, whose text takes
// the operands. These become text only if the call is refused, because each call makes dozens of
// checks.
template <class... Operands>
void require(bool served, char const* argument, char const* code, Operands const&... operands) {
  if (!served) {
    check(false, "refused: ", argument, "|", code, concat("|", operand_text(operands))...);
  }
}

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// "bf16" or "fp16", as in the table of variants; throws for other dtypes.
char const* dtype_name(Tensor const& t, char const* name);

// A new contiguous tensor on the device of `like`.
Tensor empty(Tensor const& like, std::initializer_list<int64_t> sizes, ScalarType dtype);

// Memory that only kernels use. torch's allocator gives it to later work of the stream after the
// destructor. With 0 entries nothing is allocated, because an allocation of any size takes a
// microsecond or two of a call.
class Scratch {
 public:
  Scratch(Tensor const& like, int64_t entries, ScalarType dtype);

  template <class T>
  T* data() const {
    return memory_ ? static_cast<T*>(memory_->data_ptr()) : nullptr;
  }

 private:
  OptionalTensor memory_;
};

cudaStream_t current_stream(Tensor const& t);

void check_on_device_of(Tensor const& t, char const* name, Tensor const& q);

// Checks what a kernel needs so as not to fault: q's device and dtype, and rows without gaps that
// start at multiples of 16 bytes and are whole multiples of 16 bytes long.
void check_operand(Tensor const& t, char const* name, Tensor const& q);

// The memory of an int32 vector of `size` entries on q's device.
int const* int32_vector(OptionalTensor const& t, char const* name, int64_t size, Tensor const& q);

// The memory of `count` contiguous fp32 numbers on q's device.
float const* float_vector(Tensor const& t, char const* name, int64_t count, Tensor const& q);

// A view of [b, s, h, d], or of varlen [total, h, d] with batch_stride 0
template <class T>
TensorView<T> view(Tensor const& t, void* ptr) {
  // A dimension of size 1 may have any stride, also one that would misalign addresses; so may all
  // of a tensor without elements.
  bool const empty = t.numel() == 0;
  auto const stride = [&](int dim) { return empty || t.size(dim) == 1 ? 0 : t.stride(dim); };
  bool const varlen = t.dim() == 3;
  return {ptr, varlen ? 0 : stride(0), stride(varlen ? 0 : 1), stride(varlen ? 1 : 2)};
}

// Whether the first `dims` sizes, and the number of dimensions, are alike.
inline bool alike(Tensor const& a, Tensor const& b, int64_t dims) {
  bool same = a.dim() == b.dim();
  for (int64_t i = 0; same && i < dims; ++i) {
    same = a.size(i) == b.size(i);
  }
  return same;
}

// Columns rounded up to whole chunks of 16 bytes, as in q and out.
inline int64_t in_chunks(int64_t columns) { return (columns + 7) / 8 * 8; }

// Checks for rows without gaps and q's device and dtype, for kernels that move single elements.
void check_rows(Tensor const& t, char const* name, Tensor const& q);

// Whether a cache holds codes of 8 bits (e4m3).
bool has_codes(Tensor const& t);

// The same checks of a cache of codes.
void check_codes(Tensor const& t, char const* name, Tensor const& q);

// Whether rows begin at multiples of 16 bytes and are whole multiples of 16 bytes long.
bool has_whole_chunks(Tensor const& t);

inline TensorView<const void> operand(Tensor const& t, char const* name, Tensor const& q) {
  check_operand(t, name, q);
  return view<const void>(t, t.data_ptr());
}

}  // namespace flash::api
