// Forward ops: tensors → FwdParams → variant. Schemas are defined in flash_attn/_ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "api/attributes.h"
#include "api/forward.h"
#include "api/rng.h"
#include "api/tensors.h"
#include "host/device.h"
#include "host/select.h"
#include "host/trace.h"
#include "probabilities/launch.h"

namespace flash::api {
namespace {

using torch::stable::clone;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, lse, S_dmask, rng_state

// Lengths, heads and pages are in `p` already.
Outputs launch(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p, Attributes const& a,
               bool return_softmax, OptionalTensor const& given_rng_state, Tensor const& out,
               Tensor const& lse) {
  if (return_softmax && p.pages.table) {
    throw std::runtime_error(
        concat(kNotImplemented, "probabilities (return_attn_probs) of keys in pages"));
  }
  p.q = operand(q, "q", q);
  p.k = operand(k, "k", q);
  p.v = operand(v, "v", q);
  p.out = view<void>(out, out.data_ptr());
  p.head_dim = static_cast<int>(q.size(-1));
  p.head_dim_v = static_cast<int>(v.size(-1));
  p.mask = mask(a, p.seqlens);
  OptionalTensor rng_state;
  if (a.dropout_p > 0) {
    rng_state = given_rng_state ? clone(checked_rng_state(*given_rng_state, q)) : draw_rng_state(q);
  }
  p.scores = scores(a, p, q, rng_state);

  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  launch_forward(q, p);
  Tensor s_dmask = empty(q, {0}, q.scalar_type());
  if (return_softmax) {
    Seqlens const& s = p.seqlens;
    s_dmask = empty(q, {s.batch, p.heads_q, s.seqlen_q, s.seqlen_k}, q.scalar_type());
    launch_probabilities(p, dtype_name(q, "q"), s_dmask.data_ptr(),
                         {current_device(), current_stream(q), "probabilities"});
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
  return launch(
      q, k, v, p,
      {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
      return_softmax, rng_state, out, lse);
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
  check(q.dim() == 3, "q has ", q.dim(), " dimensions, expected (total_q, h, d)");
  check(cu_seqlens_q.dim() == 1, "cu_seqlens_q has ", cu_seqlens_q.dim(),
        " dimensions, expected 1");
  int64_t const total_q = q.size(0), heads = q.size(1), batch = cu_seqlens_q.size(0) - 1;
  int64_t const dims = block_table ? 4 : 3;
  check(k.dim() == dims && divides(k.size(-2), heads) && k.size(-1) == q.size(2),
        "k must be (total_k, hk, d), or with block_table (pages, page_size, hk, d), with "
        "h % hk == 0 and h, d of q");
  check(v.dim() == dims && v.size(0) == k.size(0) && v.size(1) == k.size(1) &&
            v.size(-2) == k.size(-2),
        "v must be like k but for d");
  FwdParams p{};
  p.seqlens.batch = count(batch, "len(cu_seqlens_q) - 1");
  p.seqlens.seqlen_q = count(max_seqlen_q, "max_seqlen_q");
  p.seqlens.seqlen_k = count(max_seqlen_k, "max_seqlen_k");
  p.seqlens.total_q = count(total_q, "total_q");
  p.seqlens.cu_q = int32_vector(cu_seqlens_q, "cu_seqlens_q", batch + 1, q);
  p.seqlens.cu_k = int32_vector(cu_seqlens_k, "cu_seqlens_k", batch + 1, q);
  p.seqlens.used_k = int32_vector(seqused_k, "seqused_k", batch, q);
  p.seqlens.leftpad_k = int32_vector(leftpad_k, "leftpad_k", batch, q);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(-2), "heads_k");
  if (block_table) {
    set_pages(p, k, *block_table, q);
    // Of pages cu_seqlens_k says lengths alone, and nothing where there is a better word on them.
    if (seqused_k) {
      p.seqlens.cu_k = nullptr;
    }
  }
  Tensor out = empty(q, {total_q, heads, v.size(-1)}, q.scalar_type());
  Tensor lse = empty(q, {heads, total_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), 0, total_q};
  return launch(
      q, k, v, p,
      {dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
      return_softmax, rng_state, out, lse);
}

}  // namespace

void launch_forward(Tensor const& q, FwdParams const& p) {
  DeviceInfo const& device = current_device();
  bool const paged = p.pages.table;
  Variant const& variant =
      select({paged ? "paged" : "fwd", dtype_name(q, "q"), p.head_dim, p.head_dim_v,
              needs_full_scores(p.scores), device.sm, device.smem_per_block});
  trace_launch(p, variant);
  (paged ? variant.launch.paged : variant.launch.forward)(
      p, {device, current_stream(q), variant.name});
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  library.impl("_flash_attn_forward", TORCH_BOX(&forward));
  library.impl("_flash_attn_varlen_forward", TORCH_BOX(&varlen_forward));
}

}  // namespace flash::api
