// The op that makes codes of q, k and v. Its schema is defined in flash_attn/dispatch/encode.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/device.h"
#include "passes/encode/launch.h"

namespace flash::api {
namespace {

// Codes and descales of a tensor.
struct Encoded {
  Tensor codes;     // like x
  Tensor descales;  // (b, hk)
};

// Checks x (b, s, h, d).
EncodedTensor encoded_tensor(Tensor const& x, char const* name, Tensor const& q) {
  require(x.dim() == 4, name, "dims", x.dim(), 4);
  require(x.size(0) == q.size(0), name, "shape", x, "q", q);
  EncodedTensor t{};
  t.x = operand(x, name, q);
  t.rows = count(x.size(1), "rows");
  t.heads = count(x.size(2), "heads");
  t.columns = count(x.size(3), "head_dim");
  require(t.columns % 16 == 0, name, "head_dim", t.columns, 16);
  require(t.columns <= kMostEncodedColumns, name, "range", t.columns, 16, kMostEncodedColumns);
  return t;
}

Encoded encoded(EncodedTensor& t, Tensor const& x, int heads_kv) {
  Encoded const made{
      empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, ScalarType::Float8_e4m3fn),
      empty(x, {x.size(0), heads_kv}, ScalarType::Float)};
  t.codes = view<void>(made.codes, made.codes.data_ptr());
  t.descales = static_cast<float*>(made.descales.data_ptr());
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> make_codes(Tensor q, Tensor k,
                                                                              Tensor v,
                                                                              bool smooth_k) {
  EncodeParams p{};
  p.tensors[0] = encoded_tensor(q, "q", q);
  p.tensors[1] = encoded_tensor(k, "k", q);
  p.tensors[2] = encoded_tensor(v, "v", q);
  p.batch = count(q.size(0), "batch");
  p.heads_kv = p.tensors[1].heads;
  require(p.tensors[2].heads == p.heads_kv, "v", "shape", v, "k", k);
  require(divides(p.heads_kv, p.tensors[0].heads), "q", "shape", q, "k", k);
  Encoded const of_q = encoded(p.tensors[0], q, p.heads_kv);
  Encoded const of_k = encoded(p.tensors[1], k, p.heads_kv);
  Encoded const of_v = encoded(p.tensors[2], v, p.heads_kv);
  bool const smooth = smooth_k && p.tensors[1].rows > 0;
  Tensor mean = empty(k, {k.size(0), smooth ? 1 : 0, k.size(2), k.size(3)}, ScalarType::Float);
  p.tensors[1].mean = smooth ? static_cast<float*>(mean.data_ptr()) : nullptr;
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  Scratch const parts(q, numbers_of_parts(p), ScalarType::Float);
  p.parts = parts.data<float>();
  launch_encode(p, dtype_name(q, "q"), {current_device(), current_stream(q), "make_codes"});
  return {of_q.codes, of_k.codes, of_v.codes, of_q.descales, of_k.descales, of_v.descales, mean};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) { serve<&make_codes>(library, "_make_codes"); }

}  // namespace flash::api
