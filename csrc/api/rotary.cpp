// The rotary op: rotates or copies heads of up to three tensors, which may be parts of one. Its
// schema is defined in flash_attn/dispatch/rotary.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/device.h"
#include "passes/rotary/launch.h"

namespace flash::api {
namespace {

char const* element_name(Tensor const& x) {
  return x.scalar_type() == ScalarType::Float ? "fp32" : dtype_name(x, "x");
}

// Whether there are gaps between a row's elements. A tensor without elements may have any strides:
// a gradient's are often 0.
bool has_gaps(Tensor const& t) {
  int64_t const last = t.dim() - 1;
  return t.stride(last) != 1 && t.size(last) > 1 && t.numel() > 0;
}

// Checks x (b, s, h, d) or (total, h, d), or another part, which differs in heads alone.
void check_part(Tensor const& part, char const* name, Tensor const& x) {
  check_on_device_of(part, name, x);
  int64_t const dims = x.dim();
  require(part.scalar_type() == x.scalar_type(), name, "dtype", DtypeOf{part}, DtypeOf{x});
  require(alike(part, x, dims - 2) && part.size(dims - 1) == x.size(dims - 1), name, "shape", part,
          "x", x);
  require(!has_gaps(part), name, "unit_stride", part.stride(dims - 1));
}

void check_written(Tensor const& out) {
  for (int i = 0; i < out.dim(); ++i) {
    require(out.stride(i) != 0 || out.size(i) <= 1 || out.numel() == 0, "out", "written", i);
  }
}

// (positions, rotary_dim / 2), or (b or 1, s, rotary_dim / 2) with a row for each token
TensorView<const void> table(Tensor const& t, Tensor const& like, Tensor const& x) {
  check_on_device_of(t, "cos or sin", x);
  int64_t const dims = like.dim();
  require(t.scalar_type() == like.scalar_type() && alike(t, like, dims), "sin", "shape", t, "cos",
          like);
  require(!has_gaps(t), "cos or sin", "unit_stride", t.stride(dims - 1));
  bool const per_token = dims == 3;
  return {t.data_ptr(), per_token && t.size(0) > 1 ? t.stride(0) : 0, t.stride(dims - 2), 0};
}

RotaryHeads heads(Tensor const& out, Tensor const& x, Tensor const& like) {
  check_part(x, "x", like);
  check_part(out, "out", like);
  check_written(out);
  int64_t const n = x.size(x.dim() - 2);
  require(out.size(x.dim() - 2) == n, "out", "shape", out, "x", x);
  return {view<const void>(x, x.data_ptr()),
          view<void>(out, out.data_ptr()),
          {},
          {},
          count(n, "heads")};
}

RotaryPlaces places(Tensor const& x, Tensor const& cos, int64_t offset,
                    OptionalTensor const& offsets, OptionalTensor const& cu_seqlens) {
  int64_t const batch = cu_seqlens ? cu_seqlens->numel() - 1 : x.size(0);
  return {int32_vector(cu_seqlens, "cu_seqlens", batch + 1, x),
          int32_vector(offsets, "seqlen_offsets", batch, x),
          offset,
          count(batch, "batch"),
          count(x.size(x.dim() - 3), "seqlen"),
          count(cos.size(cos.dim() - 2), "rows of cos")};
}

void rotary(Tensor out, Tensor x, OptionalTensor out_k, OptionalTensor k, OptionalTensor out_rest,
            OptionalTensor rest, Tensor cos, Tensor sin, OptionalTensor cos_k, OptionalTensor sin_k,
            int64_t offset, OptionalTensor offsets, OptionalTensor cu_seqlens, bool interleaved,
            bool conjugate) {
  require(x.dim() == (cu_seqlens ? 3 : 4), "x", "dims", x.dim(), cu_seqlens ? 3 : 4);
  RotaryParams p{};
  p.parts[0] = heads(out, x, x);
  p.parts[0].cos = table(cos, cos, x);
  p.parts[0].sin = table(sin, cos, x);
  if (k) {
    p.parts[1] = heads(*out_k, *k, x);
    p.parts[1].cos = cos_k ? table(*cos_k, cos, x) : p.parts[0].cos;
    p.parts[1].sin = sin_k ? table(*sin_k, cos, x) : p.parts[0].sin;
  }
  if (rest) {
    p.parts[2] = heads(*out_rest, *rest, x);
  }
  p.places = places(x, cos, offset, offsets, cu_seqlens);
  p.tokens = cu_seqlens ? x.size(0) : x.size(0) * x.size(1);
  count(p.tokens, "tokens");
  p.head_dim = count(x.size(x.dim() - 1), "head_dim");
  p.half = count(cos.size(cos.dim() - 1), "columns of cos");
  require(2 * p.half <= p.head_dim && (p.places.positions > 0 || p.tokens == 0), "cos", "table",
          cos);
  p.interleaved = interleaved;
  p.conjugate = conjugate;
  p.in_place =
      x.data_ptr() == out.data_ptr() && (!k || k->data_ptr() == out_k->data_ptr()) && !rest;
  p.wide_tables = cos.scalar_type() == ScalarType::Float;
  require(p.wide_tables || cos.scalar_type() == x.scalar_type(), "cos", "dtype", DtypeOf{cos},
          "Float or that of x");
  torch::stable::accelerator::DeviceGuard const guard(x.get_device_index());
  launch_rotary(p, element_name(x), {current_device(), current_stream(x), "rotary"});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) { serve<&rotary>(library, "_rotary"); }

}  // namespace flash::api
