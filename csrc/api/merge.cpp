// The op that merges two results of attention. Its schema is defined in flash_attn/dispatch/ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/device.h"
#include "passes/merge/launch.h"

namespace flash::api {
namespace {

// LSE (b, h, rows), which may be a slice of a larger one.
RowView rows_of(Tensor const& lse, char const* name, Tensor const& out) {
  check_on_device_of(lse, name, out);
  require(lse.scalar_type() == ScalarType::Float, name, "dtype", DtypeOf{lse}, "Float");
  require(lse.dim() == 3 && lse.size(0) == out.size(0) && lse.size(1) == out.size(2) &&
              lse.size(2) == out.size(1),
          name, "shape", lse, "out", out);
  require(lse.stride(2) == 1 || lse.size(2) <= 1, name, "unit_stride", lse.stride(2));
  return {static_cast<float*>(lse.data_ptr()), lse.stride(0), lse.stride(1)};
}

bool is_fp32(Tensor const& out) { return out.scalar_type() == ScalarType::Float; }

// Checks an output like out_b, which may also be fp32.
void check_output(Tensor const& out, char const* name, Tensor const& out_b) {
  require(out_b.dim() == 4 && alike(out, out_b, 4), name, "shape", out, "out_b", out_b);
  check_operand(out, name, is_fp32(out) ? out : out_b);
  check_on_device_of(out, name, out_b);
}

void merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, OptionalTensor out) {
  Tensor const& merged = out ? *out : out_a;
  check_output(out_a, "out_a", out_b);
  check_output(merged, "out", out_b);
  MergeParams p{};
  p.out_a = view<const void>(out_a, out_a.data_ptr());
  p.out_b = operand(out_b, "out_b", out_b);
  p.out = view<void>(merged, merged.data_ptr());
  p.lse_a = rows_of(lse_a, "lse_a", out_b);
  p.lse_b = rows_of(lse_b, "lse_b", out_b);
  p.batch = count(out_b.size(0), "batch");
  p.rows = count(out_b.size(1), "rows");
  p.heads = count(out_b.size(2), "heads");
  p.head_dim_v = count(out_b.size(3), "head_dim");
  require(p.head_dim_v % 8 == 0, "out_b", "head_dim", p.head_dim_v, 8);
  torch::stable::accelerator::DeviceGuard const guard(out_b.get_device_index());
  launch_merge(p, dtype_name(out_b, "out_b"), {is_fp32(merged), is_fp32(out_a)},
               {current_device(), current_stream(out_b), "merge"});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&merge_attention>(library, "_merge_attention");
}

}  // namespace flash::api
