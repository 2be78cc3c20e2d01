// The steps of linear attention. Their schemas are defined, and their arguments described, in
// flash_attn/linear/_kernels.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/device.h"
#include "linear/delta_step.h"

namespace flash::api {
namespace {

using linear::StepParams;

// x [b, heads, columns]
TensorView<void> rows_of(Tensor const& x, char const* name, Tensor const& q, int64_t heads,
                         int64_t columns) {
  check_on_device_of(x, name, q);
  check(x.dim() == 3 && x.size(0) == q.size(0) && x.size(1) == heads && x.size(2) == columns, name,
        " must be (", q.size(0), ", ", heads, ", ", columns, ")");
  check(x.scalar_type() == q.scalar_type(), name, " has another dtype than q");
  check(x.stride(2) == 1 || columns == 1, name, " needs rows without gaps");
  return view<void>(x, x.data_ptr());
}

TensorView<void const> read_only(TensorView<void> const& x) {
  return {x.ptr, x.batch_stride, x.row_stride, x.head_stride};
}

// A gate, or beta: [heads], [b, heads] or [b, heads, k]
linear::StepGate gate_of(OptionalTensor const& g, char const* name, StepParams const& p,
                         Tensor const& q) {
  if (!g) {
    return {};
  }
  check_on_device_of(*g, name, q);
  bool const fp32 = g->scalar_type() == ScalarType::Float;
  check(fp32 || g->scalar_type() == q.scalar_type(), name, " must be fp32 or of q's dtype");
  check(g->is_contiguous(), name, " must be contiguous");
  int64_t const dims = g->dim(), h = p.heads, k = p.k_dim;
  bool const of_heads = dims == 1 && g->size(0) == h;
  bool const of_rows = dims >= 2 && g->size(0) == p.rows && g->size(1) == h;
  check(of_heads || (of_rows && (dims == 2 || (dims == 3 && g->size(2) == k))), name, " must be (",
        h, "), (", p.rows, ", ", h, ") or (", p.rows, ", ", h, ", ", k, ")");
  int64_t const of_head = dims == 3 ? k : 1;
  return {g->data_ptr(), of_heads ? 0 : h * of_head, of_head, dims == 3 ? 1 : 0, fp32};
}

// Sets the states, and how they lie.
void set_state(StepParams& p, Tensor const& state, Tensor const& q) {
  check_on_device_of(state, "state", q);
  check(state.scalar_type() == ScalarType::Float, "state must be fp32");
  check(state.dim() == 4 && state.size(1) == p.heads && state.size(2) == p.k_dim &&
            state.size(3) == p.v_dim,
        "state must be (slots, ", p.heads, ", ", p.k_dim, ", ", p.v_dim, ")");
  auto const stride = [&](int dim) { return state.size(dim) == 1 ? 0 : state.stride(dim); };
  p.state = {static_cast<float*>(state.data_ptr()), stride(0), stride(1), stride(2), stride(3)};
  p.state_count = count(state.size(0), "states");
  bool const unit_k = p.state.k_stride == 1 || p.k_dim == 1;
  bool const unit_v = p.state.v_stride == 1 || p.v_dim == 1;
  check(unit_k || unit_v, "state needs rows or columns without gaps");
  p.along_k = unit_k && (!unit_v || p.v_dim == 1);
  int const inner = p.along_k ? p.k_dim : p.v_dim;
  int64_t const outer = p.along_k ? p.state.v_stride : p.state.k_stride;
  constexpr int kRun = 4;
  p.aligned = inner % kRun == 0 && reinterpret_cast<uintptr_t>(p.state.ptr) % 16 == 0 &&
              p.state.sequence_stride % kRun == 0 && p.state.head_stride % kRun == 0 &&
              outer % kRun == 0;
}

// What both kinds of step have: all but the gate.
StepParams step_params(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& state,
                       OptionalTensor const& slots, double scale, Tensor const& o) {
  check(q.dim() == 3 && v.dim() == 3, "q and v must be (b, heads, columns)");
  StepParams p{};
  p.rows = count(q.size(0), "rows");
  p.heads = count(v.size(1), "heads");
  p.k_dim = count(q.size(2), "columns of q");
  p.v_dim = count(v.size(2), "columns of v");
  check(divides(q.size(1), p.heads), "v's heads must be a multiple of q's");
  p.group = static_cast<int>(p.heads / q.size(1));
  p.q = read_only(rows_of(q, "q", q, q.size(1), p.k_dim));
  p.k = read_only(rows_of(k, "k", q, q.size(1), p.k_dim));
  p.v = read_only(rows_of(v, "v", q, p.heads, p.v_dim));
  p.o = rows_of(o, "o", q, p.heads, p.v_dim);
  set_state(p, state, q);
  p.slots = int32_vector(slots, "slots", p.rows, q);
  check(p.slots || p.state_count == p.rows, "without slots there must be a state for each row");
  p.scale = static_cast<float>(scale);
  return p;
}

char const* step_dtype(Tensor const& q) {
  return q.scalar_type() == ScalarType::Float ? "fp32" : dtype_name(q, "q");
}

void linear_step(Tensor q, Tensor k, Tensor v, OptionalTensor g, Tensor state, OptionalTensor slots,
                 double scale, Tensor o) {
  char const* const dtype = step_dtype(q);
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  StepParams p = step_params(q, k, v, state, slots, scale, o);
  p.gate = gate_of(g, "g", p, q);
  linear::launch_step(p, dtype, {current_device(), current_stream(q), "linear step"});
}

void linear_delta_step(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                       Tensor state, OptionalTensor slots, double scale, bool normalizes,
                       double of_sigmoid, Tensor o) {
  char const* const dtype = step_dtype(q);
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  linear::DeltaStepParams p{};
  p.step = step_params(q, k, v, state, slots, scale, o);
  check(p.step.k_dim <= linear::kDeltaStepK, "no kernel of the delta rule's step takes K of ",
        p.step.k_dim);
  check(!g || g->dim() <= 2, "g must be a number a head");
  check(!beta || beta->dim() == 2, "beta must be (b, heads)");
  p.step.gate = gate_of(g, "g", p.step, q);
  p.beta = gate_of(beta, "beta", p.step, q);
  p.of_sigmoid = static_cast<float>(of_sigmoid);
  p.normalizes = normalizes;
  linear::launch_delta_step(p, dtype, {current_device(), current_stream(q), "linear delta step"});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&linear_step>(library, "_linear_step");
  serve<&linear_delta_step>(library, "_linear_delta_step");
}

}  // namespace flash::api
