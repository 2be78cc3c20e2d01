// The gated delta rule over chunks. Its schema is defined, and its arguments described, in
// flash_attn/linear/_kernels.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/direct.h"
#include "api/linear_arguments.h"
#include "launch/device.h"
#include "linear/delta_rule.h"

namespace flash::api {
namespace {

void linear_delta_forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                          OptionalTensor initial_state, OptionalTensor cu_seqlens, double scale,
                          bool normalizes, Tensor o, OptionalTensor final_state) {
  char const* const dtype = dtype_name(q, "q");
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  int const k_dim = columns_of_q(q, v);
  check(k_dim <= linear::kDeltaK, "no kernel of the delta rule takes K of ", k_dim);
  check(g.dim() == 3 && beta.dim() == 3, "g and beta must be (b, t, heads)");
  linear::DeltaParams p{
      inputs(q, k, v, g, cu_seqlens, scale, linear::kDeltaChunk), {}, nullptr, normalizes};
  ForwardParams& f = p.forward;
  set_results(f, q, initial_state, o, final_state);
  if (f.sequences.count == 0) {
    return;
  }
  p.beta = gate_view(beta, q, f.heads);
  int64_t const bytes = int64_t(f.sequences.slots) * f.heads * sizeof(linear::DeltaFactors);
  Scratch const factors(q, bytes, ScalarType::Byte);
  p.factors = factors.data<linear::DeltaFactors>();
  linear::launch_delta(p, dtype, {current_device(), current_stream(q), "linear delta forward"});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&linear_delta_forward>(library, "_linear_delta_forward");
}

}  // namespace flash::api
