// The op that finds each head's largest logit. Its schema is defined in flash_attn/dispatch/ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/device.h"
#include "passes/largest/launch.h"

namespace flash::api {
namespace {

// rows: (b, h, s), or packed (h, total). Returns (h).
Tensor largest_of_heads(Tensor rows) {
  require(rows.scalar_type() == ScalarType::Float, "rows", "dtype", DtypeOf{rows}, "Float");
  require((rows.dim() == 2 || rows.dim() == 3) && rows.is_contiguous(), "rows", "contiguous", rows);
  int64_t const last = rows.dim() - 1, heads = rows.size(last - 1);
  int64_t const batch = last == 2 ? rows.size(0) : 1;
  torch::stable::accelerator::DeviceGuard const guard(rows.get_device_index());
  Tensor out = empty(rows, {heads}, ScalarType::Float);
  LargestParams const p{static_cast<float const*>(rows.data_ptr()),
                        static_cast<float*>(out.data_ptr()), count(batch, "batch"),
                        count(heads, "heads"), rows.size(last)};
  launch_largest(p, {current_device(), current_stream(rows), "largest logits"});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&largest_of_heads>(library, "_largest_of_heads");
}

}  // namespace flash::api
