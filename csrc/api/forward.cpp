// Forward ops: tensors → FwdParams → variant. Schemas are defined in flash_attn/_ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "api/rng.h"
#include "api/tensors.h"
#include "core/dropout.h"
#include "core/mask.h"
#include "host/device.h"
#include "host/select.h"
#include "host/trace.h"
#include "probabilities/launch.h"

namespace flash::api {
namespace {

using torch::stable::clone;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, lse, S_dmask, rng_state

struct Attributes {
  double dropout_p;
  double softmax_scale;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  OptionalTensor const& alibi_slopes;
  bool return_softmax;
  OptionalTensor const& s_aux;
  OptionalTensor const& rng_state;
};

bool divides(int64_t heads_kv, int64_t heads_q) { return heads_kv > 0 && heads_q % heads_kv == 0; }

// Kernels count rows in ints and add window widths to them.
int count(int64_t n, char const* name) {
  check(n >= 0 && n < kUnbounded, name, " is ", n, ", expected 0 to ", kUnbounded - 1);
  return static_cast<int>(n);
}

// Windows as wide as every sequence are no windows; this also keeps row + window within an int.
int window(int64_t width, int64_t seqlen_q, int64_t seqlen_k) {
  int64_t const widest = std::min<int64_t>(seqlen_q + seqlen_k, kUnbounded);
  return width < 0 || width >= widest ? -1 : static_cast<int>(width);
}

// Compares what the kernel is given: a positive double may be 0 as a float.
bool needs_full_scores(Scores const& s) {
  return s.softcap != 0 || s.alibi_slopes || s.s_aux || s.dropout_p > 0 || !(s.softmax_scale > 0);
}

// Lengths and heads are in `p` already.
Scores scores(Attributes const& a, FwdParams const& p, Tensor const& q,
              OptionalTensor const& rng_state) {
  Scores s{};
  s.softmax_scale = static_cast<float>(a.softmax_scale);
  s.softcap = static_cast<float>(a.softcap);
  if (a.alibi_slopes) {
    bool const per_batch = a.alibi_slopes->dim() == 2;
    int64_t const batch = per_batch ? p.seqlens.batch : 1;
    s.alibi_slopes = float_vector(*a.alibi_slopes, "alibi_slopes", batch * p.heads_q, q);
    s.alibi_batch_stride = per_batch ? p.heads_q : 0;
  }
  if (a.s_aux) {
    s.s_aux = float_vector(*a.s_aux, "s_aux", p.heads_q, q);
  }
  if (rng_state) {
    s.dropout_p = static_cast<float>(a.dropout_p);
    s.dropout_threshold = dropout_threshold(a.dropout_p);
    s.rng_state = static_cast<int64_t const*>(rng_state->data_ptr());
  }
  return s;
}

// Lengths and heads are in `p` already.
Outputs launch(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p, Attributes const& a,
               Tensor const& out, Tensor const& lse) {
  p.q = operand(q, "q", q);
  p.k = operand(k, "k", q);
  p.v = operand(v, "v", q);
  p.out = view<void>(out, out.data_ptr());
  p.head_dim = static_cast<int>(q.size(-1));
  p.head_dim_v = static_cast<int>(v.size(-1));
  p.mask = {window(a.window_left, p.seqlens.seqlen_q, p.seqlens.seqlen_k),
            a.causal ? 0 : window(a.window_right, p.seqlens.seqlen_q, p.seqlens.seqlen_k)};
  check(a.dropout_p >= 0 && a.dropout_p < 1, "dropout_p is ", a.dropout_p,
        ", expected 0 <= dropout_p < 1");
  check(a.softcap >= 0, "softcap is ", a.softcap, ", expected 0 or more");
  OptionalTensor rng_state;
  if (a.dropout_p > 0) {
    rng_state = a.rng_state ? clone(checked_rng_state(*a.rng_state, q)) : draw_rng_state(q);
  }
  p.scores = scores(a, p, q, rng_state);

  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  DeviceInfo const& device = current_device();
  char const* const dtype = dtype_name(q, "q");
  cudaStream_t const stream = current_stream(q);
  bool const masked = p.mask.left >= 0 || p.mask.right >= 0;
  Variant const& variant =
      select({"fwd", dtype, p.head_dim, p.head_dim_v, needs_full_scores(p.scores), device.sm,
              device.smem_per_block, masked});
  trace_launch(p, variant);
  variant.launch.forward(p, {device, stream, variant.name});
  Tensor s_dmask = empty(q, {0}, q.scalar_type());
  if (a.return_softmax) {
    Seqlens const& s = p.seqlens;
    s_dmask = empty(q, {s.batch, p.heads_q, s.seqlen_q, s.seqlen_k}, q.scalar_type());
    launch_probabilities(p, dtype, s_dmask.data_ptr(), {device, stream, "probabilities"});
  }
  return {out, lse, s_dmask, rng_state ? *rng_state : empty(q, {0}, ScalarType::Long)};
}

Outputs forward(Tensor q, Tensor k, Tensor v, double dropout_p, double softmax_scale, bool causal,
                int64_t window_left, int64_t window_right, double softcap,
                OptionalTensor alibi_slopes, bool return_softmax, OptionalTensor s_aux,
                OptionalTensor rng_state, bool /*batch_invariant: every launch is*/,
                bool /*deterministic: of the backward it leads to*/) {
  check(q.dim() == 4, "q has ", q.dim(), " dimensions, expected (b, sq, h, d)");
  int64_t const batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  check(k.dim() == 4 && k.size(0) == batch && divides(k.size(2), heads) && k.size(3) == q.size(3),
        "k must be (b, sk, hk, d) with h % hk == 0 and b, h, d of q");
  check(v.dim() == 4 && v.size(0) == batch && v.size(1) == k.size(1) && v.size(2) == k.size(2),
        "v must be (b, sk, hk, dv) with b, sk, hk of k");
  FwdParams p{};
  p.seqlens.batch = count(batch, "batch");
  p.seqlens.seqlen_q = count(seqlen_q, "seqlen_q");
  p.seqlens.seqlen_k = count(k.size(1), "seqlen_k");
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(2), "heads_k");
  Tensor out = empty(q, {batch, seqlen_q, heads, v.size(3)}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, seqlen_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), heads * seqlen_q, seqlen_q};
  return launch(q, k, v, p,
                {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
                 return_softmax, s_aux, rng_state},
                out, lse);
}

Outputs varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
                       double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                       double softcap, OptionalTensor alibi_slopes, bool return_softmax,
                       OptionalTensor block_table, OptionalTensor leftpad_k,
                       OptionalTensor seqused_k, bool /*zero_tensors: always zero*/,
                       OptionalTensor s_aux, OptionalTensor rng_state,
                       bool /*batch_invariant: every launch is*/,
                       bool /*deterministic: of the backward it leads to*/) {
  if (block_table) {
    throw std::runtime_error(concat(kNotImplemented, "block_table on CUDA tensors"));
  }
  check(q.dim() == 3, "q has ", q.dim(), " dimensions, expected (total_q, h, d)");
  check(cu_seqlens_q.dim() == 1, "cu_seqlens_q has ", cu_seqlens_q.dim(),
        " dimensions, expected 1");
  int64_t const total_q = q.size(0), heads = q.size(1), batch = cu_seqlens_q.size(0) - 1;
  check(k.dim() == 3 && divides(k.size(1), heads) && k.size(2) == q.size(2),
        "k must be (total_k, hk, d) with h % hk == 0 and h, d of q");
  check(v.dim() == 3 && v.size(0) == k.size(0) && v.size(1) == k.size(1),
        "v must be (total_k, hk, dv) with total_k, hk of k");
  FwdParams p{};
  p.seqlens.batch = count(batch, "len(cu_seqlens_q) - 1");
  p.seqlens.seqlen_q = count(max_seqlen_q, "max_seqlen_q");
  p.seqlens.seqlen_k = count(max_seqlen_k, "max_seqlen_k");
  p.seqlens.total_q = count(total_q, "total_q");
  p.seqlens.total_k = count(k.size(0), "total_k");
  p.seqlens.cu_q = int32_vector(cu_seqlens_q, "cu_seqlens_q", batch + 1, q);
  p.seqlens.cu_k = int32_vector(cu_seqlens_k, "cu_seqlens_k", batch + 1, q);
  p.seqlens.used_k = int32_vector(seqused_k, "seqused_k", batch, q);
  p.seqlens.leftpad_k = int32_vector(leftpad_k, "leftpad_k", batch, q);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(1), "heads_k");
  Tensor out = empty(q, {total_q, heads, v.size(2)}, q.scalar_type());
  Tensor lse = empty(q, {heads, total_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), 0, total_q};
  return launch(q, k, v, p,
                {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
                 return_softmax, s_aux, rng_state},
                out, lse);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  library.impl("_flash_attn_forward", TORCH_BOX(&forward));
  library.impl("_flash_attn_varlen_forward", TORCH_BOX(&varlen_forward));
}

}  // namespace flash::api
