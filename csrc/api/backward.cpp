// Backward ops: tensors → BwdParams → variant. Schemas are defined in flash_attn/dispatch/ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "api/arguments.h"
#include "api/direct.h"
#include "launch/backward_plan.h"
#include "launch/device.h"
#include "launch/select.h"
#include "launch/stream_lock.h"
#include "launch/trace.h"
#include "launch/workspace.h"

namespace flash::api {
namespace {

struct Gradients {
  OptionalTensor const& dq;
  OptionalTensor const& dk;
  OptionalTensor const& dv;
  OptionalTensor const& ds_aux;
};

struct Forward {
  Tensor const& q;
  Tensor const& k;
  Tensor const& v;
  Tensor const& out;
  Tensor const& lse;
  OptionalTensor const& rng_state;
};

void check_shape(Tensor const& t, char const* name, Tensor const& like, int64_t last) {
  int64_t const columns = t.dim() - 1;
  require(alike(t, like, columns) && t.size(columns) == last, name, "shape", t, "its operand",
          like);
}

// A gradient with the shape of `like`, or an empty view if it is not wanted.
TensorView<void> gradient(OptionalTensor const& t, char const* name, Tensor const& like,
                          Tensor const& q) {
  if (!t) {
    return {};
  }
  check_shape(*t, name, like, like.size(like.dim() - 1));
  check_operand(*t, name, q);
  return view<void>(*t, t->data_ptr());
}

// One number per row, in the layout of LSE: contiguous (b, h, sq) or (h, total_q).
RowView rows(Tensor const& t, char const* name, Tensor const& q) {
  bool const varlen = q.dim() == 3;
  int64_t const heads = q.size(varlen ? 1 : 2), seqlen = q.size(varlen ? 0 : 1);
  require(t.dim() == q.dim() - 1 && (varlen || t.size(0) == q.size(0)) &&
              t.size(varlen ? 0 : 1) == heads && t.size(varlen ? 1 : 2) == seqlen,
          name, "shape", t, "q", q);
  float_vector(t, name, t.numel(), q);
  return {static_cast<float*>(t.data_ptr()), varlen ? 0 : heads * seqlen, seqlen};
}

// `p` has the lengths already.
Tensor launch(BwdParams p, Tensor const& dout, Forward const& f, Gradients const& g,
              ScoreArguments const& a, OptionalTensor const& dlse, bool deterministic) {
  Tensor const& q = f.q;
  p.heads_q = count(q.size(q.dim() - 2), "heads");
  p.heads_kv = count(f.k.size(q.dim() - 2), "heads_k");
  if (p.heads_q == 0) {  // there are no rows then, and dK and dV are zeros
    p.seqlens.seqlen_q = 0;
    p.seqlens.total_q = 0;
  }
  p.head_dim = static_cast<int>(q.size(q.dim() - 1));
  p.head_dim_v = static_cast<int>(f.v.size(q.dim() - 1));
  check_shape(f.out, "out", q, p.head_dim_v);
  check_shape(dout, "dout", q, p.head_dim_v);
  p.q = operand(q, "q", q);
  p.k = operand(f.k, "k", q);
  p.v = operand(f.v, "v", q);
  p.out = operand(f.out, "out", q);
  p.dout = operand(dout, "dout", q);
  p.dq = gradient(g.dq, "dq", q, q);
  p.dk = gradient(g.dk, "dk", f.k, q);
  p.dv = gradient(g.dv, "dv", f.v, q);
  p.lse = rows(f.lse, "softmax_lse", q);
  p.dlse = dlse ? rows(*dlse, "dlse", q) : RowView{};
  if (g.ds_aux) {
    require(a.s_aux.has_value(), "ds_aux", "needs", "s_aux");
    float_vector(*g.ds_aux, "ds_aux", p.heads_q, q);
    p.ds_aux = static_cast<float*>(g.ds_aux->data_ptr());
  }
  check_numbers(a);
  OptionalTensor rng_state;
  if (a.dropout_p > 0) {
    require(f.rng_state.has_value(), "dropout_p", "needs", "rng_state of the forward");
    rng_state = checked_rng_state(*f.rng_state, p.seqlens.batch, q);
  }
  p.mask = mask(a, p.seqlens);
  p.scores = scores(a, p.seqlens, p.heads_q, q, rng_state);

  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  DeviceInfo const& device = current_device();
  Variant const& variant = select({Direction::Bwd, dtype_name(q, "q"), p.head_dim, p.head_dim_v,
                                   p.scores.has_score_mods(), device.sm, device.smem_per_block,
                                   PageLayout::Any, p.scores.softcap});
  FirstLaunch const first(variant, device);
  Tensor softmax_d =
      f.lse.dim() == 3 ? empty(q, {f.lse.size(0), f.lse.size(1), f.lse.size(2)}, ScalarType::Float)
                       : empty(q, {f.lse.size(0), f.lse.size(1)}, ScalarType::Float);
  p.softmax_d = rows(softmax_d, "softmax_d", q);
  plan::BackwardPlan const plan = backward_plan_of(p, variant, device, deterministic);
  follow(plan.choice, variant, device, deterministic, p);
  BwdWorkspaceSize const size = workspace_size(p, variant, deterministic);
  Scratch const sums(q, size.dq, ScalarType::Float), stats(q, size.stats, ScalarType::Float),
      split_sums(q, size.split_sums, ScalarType::Float),
      dq_semaphores(q, size.dq_semaphores, ScalarType::Int),
      deltas_done(q, size.deltas_done, ScalarType::Int), order(q, size.order, ScalarType::Int);
  p.workspace = {sums.data<float>(),
                 stats.data<float>(),
                 dq_semaphores.data<int>(),
                 deltas_done.data<int>(),
                 order.data<int>(),
                 {},
                 {}};
  place_split_sums(p, variant, split_sums.data<float>());
  trace_launch(p, variant, plan);
  StreamLock const lock(current_stream(q));  // after all allocations (launch/stream_lock.h)
  variant.launch.backward(p, {device, lock.stream(), variant.name});
  return softmax_d;
}

Tensor backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
                OptionalTensor dq, OptionalTensor dk, OptionalTensor dv, double dropout_p,
                double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                double softcap, OptionalTensor alibi_slopes, bool deterministic,
                OptionalTensor rng_state, OptionalTensor dlse, OptionalTensor s_aux,
                OptionalTensor ds_aux, int64_t sm_margin) {
  SmMargin const margin = margin_of(sm_margin);
  BwdParams p{};
  p.seqlens = dense_lengths(q, k, v);
  return launch(
      p, dout, {q, k, v, out, softmax_lse, rng_state}, {dq, dk, dv, ds_aux},
      {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
      dlse, deterministic);
}

Tensor varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
                       OptionalTensor dq, OptionalTensor dk, OptionalTensor dv, Tensor cu_seqlens_q,
                       Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                       double dropout_p, double softmax_scale, bool causal, int64_t window_left,
                       int64_t window_right, double softcap, OptionalTensor alibi_slopes,
                       bool deterministic, OptionalTensor rng_state,
                       bool /*zero_tensors: always zero*/, OptionalTensor dlse,
                       OptionalTensor s_aux, OptionalTensor ds_aux, int64_t sm_margin,
                       OptionalTensor seqused_k) {
  SmMargin const margin = margin_of(sm_margin);
  BwdParams p{};
  p.seqlens =
      varlen_lengths(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k);
  return launch(
      p, dout, {q, k, v, out, softmax_lse, rng_state}, {dq, dk, dv, ds_aux},
      {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
      dlse, deterministic);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&backward>(library, "_flash_attn_backward");
  serve<&varlen_backward>(library, "_flash_attn_varlen_backward");
}

}  // namespace flash::api
