// The ops that make codes of q, k and v, or of queries alone. Their schemas are defined in
// flash_attn/dispatch/encode.py.
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

// Checks x (b, s, h, d), or varlen (total, h, d).
EncodedTensor encoded_tensor(Tensor const& x, char const* name, Tensor const& q, int dims = 4) {
  require(x.dim() == dims, name, "dims", x.dim(), dims);
  EncodedTensor t{};
  t.x = operand(x, name, q);
  t.rows = count(x.size(-3), "rows");
  t.heads = count(x.size(-2), "heads");
  t.columns = count(x.size(-1), "head_dim");
  require(t.columns % 16 == 0, name, "head_dim", t.columns, 16);
  require(t.columns <= kMostEncodedColumns, name, "range", t.columns, 16, kMostEncodedColumns);
  return t;
}

Encoded encoded(EncodedTensor& t, Tensor const& x, EncodeParams const& p) {
  auto constexpr kCodes = ScalarType::Float8_e4m3fn;
  Tensor const codes = x.dim() == 3
                           ? empty(x, {x.size(0), x.size(1), x.size(2)}, kCodes)
                           : empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, kCodes);
  Encoded const made{codes, empty(x, {p.batch, p.heads_kv}, ScalarType::Float)};
  t.codes = view<void>(made.codes, made.codes.data_ptr());
  t.descales = static_cast<float*>(made.descales.data_ptr());
  return made;
}

void launch(EncodeParams& p, Tensor const& q, char const* name) {
  Scratch const parts(q, numbers_of_parts(p), ScalarType::Float);
  p.parts = parts.data<float>();
  launch_encode(p, dtype_name(q, "q"), {current_device(), current_stream(q), name});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> make_codes(Tensor q, Tensor k,
                                                                              Tensor v,
                                                                              bool smooth_k) {
  EncodeParams p{};
  p.count = 3;
  p.tensors[0] = encoded_tensor(q, "q", q);
  p.tensors[1] = encoded_tensor(k, "k", q);
  p.tensors[2] = encoded_tensor(v, "v", q);
  p.batch = count(q.size(0), "batch");
  require(k.size(0) == p.batch, "k", "shape", k, "q", q);
  require(v.size(0) == p.batch, "v", "shape", v, "q", q);
  p.heads_kv = p.tensors[1].heads;
  require(p.tensors[2].heads == p.heads_kv, "v", "shape", v, "k", k);
  require(divides(p.heads_kv, p.tensors[0].heads), "q", "shape", q, "k", k);
  Encoded const of_q = encoded(p.tensors[0], q, p);
  Encoded const of_k = encoded(p.tensors[1], k, p);
  Encoded const of_v = encoded(p.tensors[2], v, p);
  bool const smooth = smooth_k && p.tensors[1].rows > 0;
  Tensor mean = empty(k, {k.size(0), smooth ? 1 : 0, k.size(2), k.size(3)}, ScalarType::Float);
  p.tensors[1].mean = smooth ? static_cast<float*>(mean.data_ptr()) : nullptr;
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  launch(p, q, "make_codes");
  return {of_q.codes, of_k.codes, of_v.codes, of_q.descales, of_k.descales, of_v.descales, mean};
}

// Codes and descales of varlen queries, (total_q, h, d).
std::tuple<Tensor, Tensor> make_query_codes(Tensor q, Tensor cu_seqlens_q, int64_t heads_kv) {
  EncodeParams p{};
  p.count = 1;
  p.batch = count(cu_seqlens_q.numel() - 1, "len(cu_seqlens_q) - 1");
  p.heads_kv = count(heads_kv, "heads_kv");
  EncodedTensor& t = p.tensors[0] = encoded_tensor(q, "q", q, 3);
  require(divides(p.heads_kv, t.heads), "heads_kv", "needs", "q's heads to be a multiple of it");
  t.cu_rows = int32_vector(cu_seqlens_q, "cu_seqlens_q", int64_t(p.batch) + 1, q);
  t.rows = p.batch ? t.rows : 0;
  Encoded const made = encoded(t, q, p);
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  launch(p, q, "make_query_codes");
  return {made.codes, made.descales};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&make_codes>(library, "_make_codes");
  serve<&make_query_codes>(library, "_make_query_codes");
}

}  // namespace flash::api
