// The operations of linear attention. Their schemas are defined, and their arguments described, in
// flash_attn/linear/_kernels.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/direct.h"
#include "api/linear_arguments.h"
#include "launch/device.h"
#include "linear/launch.h"

namespace flash::api {
namespace {

// What the launches leave for each other.
struct WorkspaceOf {
  int64_t const states, strips;
  Scratch const sums, before, decays, weights;

  WorkspaceOf(Tensor const& q, ForwardParams const& p, int chunk, bool with_weights)
      : states(int64_t(p.sequences.slots) * p.heads),
        strips(chunk / 16),
        sums(q, states * p.state_size(), ScalarType::Float),
        before(q, states * p.state_size(), ScalarType::Half),
        decays(q, states, ScalarType::Float),
        weights(q, with_weights ? states * strips * strips * kSquareBytes : 0, ScalarType::Byte) {}

  linear::Workspace pointers() const {
    return {sums.data<float>(), before.data<void>(), decays.data<float>(), weights.data<uint4>(),
            nullptr};
  }

 private:
  static constexpr int64_t kSquareBytes = 16 * 16 * sizeof(uint16_t);
};

// What the launches leave for each other whose CTAs walk along segments: nothing where each
// sequence is one.
struct WalkWorkspaceOf {
  int64_t const states;
  Scratch const sums, decays;

  // decays_of: numbers that are a state's factor over a segment.
  WalkWorkspaceOf(Tensor const& q, ForwardParams const& p, linear::WalkTiling const& tiling,
                  int decays_of)
      : states(p.sequences.seqlen > p.sequences.chunk ? int64_t(p.sequences.slots) * p.heads : 0),
        sums(q, states * tiling.state_size(p.v_dim), ScalarType::Float),
        decays(q, states * decays_of, ScalarType::Float) {}

  linear::Workspace pointers() const {
    if (states == 0) {
      return {};
    }
    return {sums.data<float>(), nullptr, decays.data<float>(), nullptr, nullptr};
  }
};

// With a vector of decays, the factors of all chunks, of one walk at a time: nothing where walks
// make them.
Scratch vector_factors(Tensor const& q, ForwardParams const& p, linear::WalkTiling const& tiling) {
  linear::Sequences const& s = p.sequences;
  int64_t const slots = linear::makes_own_factors(tiling)
                            ? 0
                            : linear::most_slots(s.cu, s.count, s.seqlen, tiling.chunk);
  return {q, slots * p.heads * linear::vector_factors_bytes(tiling), ScalarType::Byte};
}

// The tiling of a call with a vector of decays.
linear::WalkTiling const& vector_tiling(Tensor const& q, Tensor const& v) {
  int const number = linear::vector_number(columns_of_q(q, v));
  check(number < linear::kVectorTilingCount, "no kernel for a vector of decays takes K of ",
        q.size(3));
  return linear::kVectorTilings[number];
}

bool has_aligned_gates(ForwardParams const& p) {
  TensorView<void const> const gates{p.gate.ptr, p.gate.batch_stride, p.gate.row_stride,
                                     p.gate.head_stride};
  return is_aligned(gates, p.k_dim, p.gate.fp32 ? sizeof(float) : sizeof(uint16_t));
}

void vector_forward(Tensor const& q, Tensor const& k, Tensor const& v, OptionalTensor const& g,
                    OptionalTensor const& initial_state, OptionalTensor const& cu_seqlens,
                    double scale, Tensor const& o, OptionalTensor const& final_state) {
  linear::WalkTiling const& tiling = vector_tiling(q, v);
  linear::VectorParams p{inputs(q, k, v, g, cu_seqlens, scale, tiling.segment), false, {}};
  ForwardParams& f = p.forward;
  p.aligned_g = has_aligned_gates(f);
  p.scale = linear::forward_scale(f.scale);
  set_results(f, q, initial_state, o, final_state);
  if (f.sequences.count == 0) {
    return;
  }
  WalkWorkspaceOf const workspace(q, f, tiling, tiling.k_tile);
  Scratch const factors = vector_factors(q, f, tiling);
  f.workspace = workspace.pointers();
  f.workspace.factors = factors.data<void>();
  linear::launch_vector_forward(p, dtype_name(q, "q"),
                                {current_device(), current_stream(q), "linear forward"});
}

void linear_forward(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor initial_state,
                    OptionalTensor cu_seqlens, double scale, Tensor o, OptionalTensor final_state) {
  char const* const dtype = dtype_name(q, "q");
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  if (is_vector(g)) {
    vector_forward(q, k, v, g, initial_state, cu_seqlens, scale, o, final_state);
    return;
  }
  int const k_dim = columns_of_q(q, v);
  int const chunk = linear::kTilings[linear::tiling_number(k_dim)].chunk;
  int const walk = linear::walk_number(k_dim, current_device().smem_per_block);
  bool const walks = walk < linear::kWalkTilingCount;
  ForwardParams p =
      inputs(q, k, v, g, cu_seqlens, scale, walks ? linear::kWalkTilings[walk].segment : chunk);
  set_results(p, q, initial_state, o, final_state);
  if (p.sequences.count == 0) {
    return;
  }
  LaunchContext const launch{current_device(), current_stream(q), "linear forward"};
  if (walks) {
    WalkWorkspaceOf const workspace(q, p, linear::kWalkTilings[walk], 1);
    p.workspace = workspace.pointers();
    linear::launch_forward(p, dtype, launch);
  } else {
    WorkspaceOf const workspace(q, p, chunk, /*with_weights=*/true);
    p.workspace = workspace.pointers();
    linear::launch_forward(p, dtype, launch);
  }
}

// x [b, t, heads, columns] contiguous
TensorView<void> gradient_view(Tensor const& x, char const* name, Tensor const& q, int64_t heads,
                               int64_t columns, ScalarType dtype) {
  check_on_device_of(x, name, q);
  check(x.dim() == 4 && x.size(0) == q.size(0) && x.size(1) == q.size(1) && x.size(2) == heads &&
            x.size(3) == columns,
        name, " must be (", q.size(0), ", ", q.size(1), ", ", heads, ", ", columns, ")");
  check(x.scalar_type() == dtype, name, " has another dtype than expected");
  check(x.is_contiguous(), name, " must be contiguous");
  return view<void>(x, x.data_ptr());
}

float* gate_gradient(OptionalTensor const& dg, bool is_vector, ForwardParams const& p,
                     Tensor const& q) {
  if (!dg) {
    return nullptr;
  }
  check_on_device_of(*dg, "dg", q);
  check(p.gate.ptr, "dg without g");
  check(dg->dim() == 3 + is_vector && dg->size(0) == q.size(0) && dg->size(1) == q.size(1) &&
            dg->size(2) == p.heads && (!is_vector || dg->size(3) == p.k_dim),
        "dg must have the shape of g by token, (", q.size(0), ", ", q.size(1), ", ", p.heads,
        ", …)");
  check(dg->scalar_type() == ScalarType::Float && dg->is_contiguous(),
        "dg must be fp32 and contiguous");
  return static_cast<float*>(dg->data_ptr());
}

// dO, the states' gradients and the results but dg, of either kind of decays.
void set_gradients(linear::BackwardParams& p, Tensor const& q, Tensor const& dout,
                   OptionalTensor const& initial_state, OptionalTensor const& dfinal_state,
                   Tensor const& dq, Tensor const& dk, Tensor const& dv,
                   OptionalTensor const& dinitial_state) {
  ForwardParams& f = p.forward;
  check_tensor(dout, "do", q, f.heads, f.v_dim);
  p.dout = view<void const>(dout, dout.data_ptr());
  f.aligned_v = f.aligned_v && is_aligned(p.dout, f.v_dim);
  f.initial = state_view<float const>(initial_state, "initial_state", f, q);
  p.dfinal = state_view<float const>(dfinal_state, "dfinal_state", f, q);
  p.dinitial = state_view<float>(dinitial_state, "dinitial_state", f, q);
  p.fp32 = dq.scalar_type() == ScalarType::Float;
  ScalarType const of_dqk = p.fp32 ? ScalarType::Float : q.scalar_type();
  p.dq = gradient_view(dq, "dq", q, f.heads, f.k_dim, of_dqk);
  p.dk = gradient_view(dk, "dk", q, f.heads, f.k_dim, of_dqk);
  p.dv = gradient_view(dv, "dv", q, f.heads, f.v_dim, q.scalar_type());
}

// Memory of a backward with a vector of decays beside the states before segments: the states of all
// steps, and parts of dq, dk and dg where V has several tiles.
struct VectorGradientsWorkspace {
  int const k_tile, v_tile, tiles_v;
  int64_t const rows;  // numbers of dq, of dk and of dg
  Scratch const states, parts;

  VectorGradientsWorkspace(Tensor const& q, ForwardParams const& p, bool with_dg)
      : VectorGradientsWorkspace(
            q, p, with_dg,
            linear::kVectorGradientsTilings[linear::vector_gradients_number(p.k_dim, p.v_dim)]) {}

  // Where launches write the gradient that is to be `whole`.
  linear::VectorGradientsParams target(TensorView<void> const& whole, float* dg, int number,
                                       bool fp32) const {
    linear::VectorGradientsParams p{};
    p.out = whole;
    p.dg = dg;
    p.fp32 = fp32 || tiles_v > 1;
    p.v_tile_stride = rows;
    p.states = states.data<uint4>();
    if (tiles_v > 1) {
      p.out.ptr = part(number);
      p.dg = dg ? part(2) : nullptr;
    }
    return p;
  }
  float* part(int number) const { return parts.data<float>() + number * tiles_v * rows; }

 private:
  VectorGradientsWorkspace(Tensor const& q, ForwardParams const& p, bool with_dg,
                           linear::VectorGradientsTiling const& tiling)
      : k_tile(tiling.k_tile),
        v_tile(tiling.v_tile),
        tiles_v((p.v_dim + v_tile - 1) / v_tile),
        rows(q.size(0) * q.size(1) * p.heads * p.k_dim),
        states(q, with_dg ? steps(p) * p.heads * state_size(p) : 0, ScalarType::Half),
        parts(q, tiles_v > 1 ? (2 + with_dg) * tiles_v * rows : 0, ScalarType::Float) {}

  static int64_t steps(ForwardParams const& p) {
    linear::Sequences const& s = p.sequences;
    return linear::most_slots(s.cu, s.count, s.seqlen, 16);
  }
  int64_t state_size(ForwardParams const& p) const {
    return int64_t((p.k_dim + k_tile - 1) / k_tile * k_tile) * tiles_v * v_tile;
  }
};

// dQ is a walk from the first token to the last. dV and dK are walks from the last to the first,
// where q and k change places and dO is in the place of v.
void vector_backward(linear::BackwardParams const& p, Tensor const& q,
                     linear::WalkTiling const& tiling) {
  ForwardParams const& f = p.forward;
  char const* const dtype = dtype_name(q, "q");
  VectorGradientsWorkspace const workspace(q, f, p.dg);
  WalkWorkspaceOf const before(q, f, tiling, tiling.k_tile), after(q, f, tiling, tiling.k_tile);
  Scratch const factors = vector_factors(q, f, tiling);
  linear::VectorBackwardParams of{workspace.target(p.dq, p.dg, 0, p.fp32),
                                  workspace.target(p.dk, p.dg, 1, p.fp32)};
  bool const aligned_g = has_aligned_gates(f);
  of.dq.walk = {f, aligned_g, linear::forward_scale(f.scale)};
  of.dq.walk.forward.workspace = before.pointers();
  of.dq.walk.forward.workspace.factors = factors.data<void>();
  of.dq.reading = p.dout;

  ForwardParams reverse = f;
  reverse.q = f.k;
  reverse.k = f.q;
  reverse.v = p.dout;
  reverse.o = p.dv;
  reverse.aligned_v = f.aligned_v && is_aligned(p.dv, f.v_dim);
  reverse.initial = p.dfinal;
  reverse.final = p.dinitial;
  reverse.order = linear::Order::Reverse;
  reverse.workspace = after.pointers();
  reverse.workspace.factors = factors.data<void>();
  of.dk.walk = {reverse, aligned_g, linear::reverse_scale(f.scale)};
  of.dk.reading = f.v;

  LaunchContext const launch{current_device(), current_stream(q), "linear backward"};
  linear::launch_vector_backward(of, dtype, launch);
  if (workspace.tiles_v > 1) {
    linear::PartsParams parts{workspace.part(0), workspace.tiles_v, workspace.rows,
                              p.dq.ptr,          p.dq.row_stride,   f.sequences};
    linear::launch_add_parts(parts, p.fp32 ? "fp32" : dtype, launch);
    parts.parts = workspace.part(1);
    parts.out = p.dk.ptr;
    linear::launch_add_parts(parts, p.fp32 ? "fp32" : dtype, launch);
    if (p.dg) {
      parts.parts = workspace.part(2);
      parts.out = p.dg;
      linear::launch_add_parts(parts, "fp32", launch);
    }
  }
}

void linear_backward(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor initial_state,
                     OptionalTensor cu_seqlens, double scale, Tensor dout,
                     OptionalTensor dfinal_state, Tensor dq, Tensor dk, Tensor dv,
                     OptionalTensor dg, OptionalTensor dinitial_state) {
  char const* const dtype = dtype_name(q, "q");
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  linear::BackwardParams p{};
  ForwardParams& f = p.forward;
  bool const by_vector = is_vector(g);
  int const chunk = linear::kTilings[linear::tiling_number(columns_of_q(q, v))].chunk;
  check(chunk == linear::kGradientsChunk, "states of other chunks than the gradients'");
  f = inputs(q, k, v, g, cu_seqlens, scale, by_vector ? vector_tiling(q, v).segment : chunk);
  set_gradients(p, q, dout, initial_state, dfinal_state, dq, dk, dv, dinitial_state);
  p.dg = gate_gradient(dg, by_vector, f, q);
  if (f.sequences.count == 0) {
    return;
  }
  if (by_vector) {
    vector_backward(p, q, vector_tiling(q, v));
    return;
  }
  WorkspaceOf const workspace(q, f, chunk, /*with_weights=*/false);
  Scratch const dstates(q, workspace.states * f.state_size(), ScalarType::Half);
  f.workspace = workspace.pointers();
  p.dstates = dstates.data<void>();
  linear::launch_backward(p, dtype, {current_device(), current_stream(q), "linear backward"});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&linear_forward>(library, "_linear_forward");
  serve<&linear_backward>(library, "_linear_backward");
}

}  // namespace flash::api
