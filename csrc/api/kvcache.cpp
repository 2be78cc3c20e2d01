// The KV cache op: append and turn, then attend. Schemas are defined in flash_attn/_ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "api/arguments.h"
#include "api/forward.h"
#include "api/tensors.h"
#include "host/decode_plan.h"
#include "host/device.h"
#include "host/select.h"
#include "host/trace.h"

namespace flash::api {
namespace {

struct NewKeys {
  OptionalTensor const& k;  // (b, s_new, hk, d)
  OptionalTensor const& v;
  OptionalTensor const& rotary_cos;  // (positions, rotary_dim / 2)
  OptionalTensor const& rotary_sin;
  bool rotary_interleaved;
  bool advance_q;  // query i turns by i more than query 0
};

void const* rotary_table(Tensor const& t, char const* name, Tensor const& like, Tensor const& q) {
  check_on_device_of(t, name, q);
  check(t.scalar_type() == q.scalar_type() && t.dim() == 2 && t.size(0) == like.size(0) &&
            t.size(1) == like.size(1) && (t.size(1) == 1 || t.stride(1) == 1),
        name,
        " must be (positions, rotary_dim / 2) of q's dtype with stride 1 in a row, and like "
        "the other table");
  return t.data_ptr();
}

Rotary rotary(NewKeys const& a, FwdParams const& p, Tensor const& q) {
  Rotary r{};
  check(a.rotary_cos.has_value() == a.rotary_sin.has_value(),
        "rotary_cos and rotary_sin come together");
  if (a.rotary_cos) {
    Tensor const& cos = *a.rotary_cos;
    r.cos = rotary_table(cos, "rotary_cos", cos, q);
    r.sin = rotary_table(*a.rotary_sin, "rotary_sin", cos, q);
    check(cos.size(0) > 0 && cos.size(1) > 0 && 2 * cos.size(1) <= p.head_dim, "rotary_cos is (",
          cos.size(0), ", ", cos.size(1),
          "), expected at least one position and rotary_dim / 2 of at most ", p.head_dim / 2);
    r.cos_stride = cos.stride(0);
    r.sin_stride = a.rotary_sin->stride(0);
    r.positions = count(cos.size(0), "positions of rotary_cos");
    r.rotary_dim = static_cast<int>(2 * cos.size(1));
    r.interleaved = a.rotary_interleaved;
    r.advance_q = a.advance_q;
  }
  return r;
}

Variant const& variant_for(char const* direction, Tensor const& q, FwdParams const& p,
                           bool full_scores) {
  DeviceInfo const& device = current_device();
  return select({direction, dtype_name(q, "q"), p.head_dim, p.head_dim_v, full_scores, device.sm,
                 device.smem_per_block});
}

// A dimension that divides, also where there is nothing to divide.
FastDiv divisor(int64_t n) { return FastDiv(static_cast<int>(std::max<int64_t>(n, 1))); }

// Writes the new keys, and returns q as the attention needs it.
Tensor append(Tensor const& q, FwdParams const& p, NewKeys const& a) {
  AppendParams n{};
  n.rotary = rotary(a, p, q);
  Tensor turned = q;
  if (n.rotary.cos) {
    turned = empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)}, q.scalar_type());
    n.q_turned = view<void>(turned, turned.data_ptr());
  }
  n.q = p.q;
  n.k = operand(*a.k, "k", q);
  n.v = operand(*a.v, "v", q);
  auto const writable = [](TensorView<const void> const& x) -> TensorView<void> {
    return {const_cast<void*>(x.ptr), x.batch_stride, x.row_stride, x.head_stride};
  };
  n.k_cache = writable(p.k);
  n.v_cache = writable(p.v);
  n.pages = p.pages;
  n.seqlens = p.seqlens;
  n.seqlen_q = divisor(p.seqlens.seqlen_q);
  n.new_k = divisor(p.seqlens.new_k);
  n.heads_q = divisor(p.heads_q);
  n.heads_kv = divisor(p.heads_kv);
  n.head_dim = p.head_dim;
  n.head_dim_v = p.head_dim_v;
  n.queries = n.rotary.cos ? q.size(0) * q.size(1) * q.size(2) : 0;
  n.keys = a.k->size(0) * a.k->size(1) * a.k->size(2);
  Variant const& variant = variant_for("append", q, p, false);
  trace_launch(p, variant);
  variant.launch.append(n, {current_device(), current_stream(q), variant.name});
  return turned;
}

std::tuple<Tensor, Tensor> with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, OptionalTensor k,
                                        OptionalTensor v, OptionalTensor rotary_cos,
                                        OptionalTensor rotary_sin, OptionalTensor cache_seqlens,
                                        OptionalTensor cache_batch_idx,
                                        OptionalTensor cache_leftpad, OptionalTensor block_table,
                                        double softmax_scale, bool causal, int64_t window_left,
                                        int64_t window_right, double softcap,
                                        bool rotary_interleaved, OptionalTensor alibi_slopes,
                                        int64_t num_splits, OptionalTensor s_aux) {
  check(q.dim() == 4, "q has ", q.dim(), " dimensions, expected (b, sq, h, d)");
  int64_t const batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  check(k_cache.dim() == 4 && divides(k_cache.size(2), heads) && k_cache.size(3) == q.size(3),
        "k_cache must be (b, sk, hk, d), or pages, with h % hk == 0 and h, d of q");
  check(v_cache.dim() == 4 && v_cache.size(0) == k_cache.size(0) &&
            v_cache.size(1) == k_cache.size(1) && v_cache.size(2) == k_cache.size(2),
        "v_cache must be like k_cache but for d");
  check(!block_table || !cache_batch_idx, "cache_batch_idx goes with no block_table");
  check(block_table || cache_batch_idx || k_cache.size(0) == batch, "k_cache has batch ",
        k_cache.size(0), ", without cache_batch_idx it must be that of q, ", batch);
  check(num_splits >= 0, "num_splits is ", num_splits, ", expected 0 or more");
  check(k.has_value() == v.has_value(), "k and v are appended together or not at all");
  check(k || !rotary_cos, "rotary_cos comes with new keys k");
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  Tensor out = empty(q, {batch, seqlen_q, heads, v_cache.size(3)}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, seqlen_q}, ScalarType::Float);

  FwdParams p{};
  p.q = operand(q, "q", q);
  p.k = operand(k_cache, "k_cache", q);
  p.v = operand(v_cache, "v_cache", q);
  p.out = view<void>(out, out.data_ptr());
  p.lse = {static_cast<float*>(lse.data_ptr()), heads * seqlen_q, seqlen_q};
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k_cache.size(2), "heads_k");
  p.head_dim = static_cast<int>(q.size(3));
  p.head_dim_v = static_cast<int>(v_cache.size(3));
  p.seqlens.batch = count(batch, "batch");
  p.seqlens.seqlen_q = count(seqlen_q, "seqlen_q");
  p.seqlens.seqlen_k = count(k_cache.size(1), "rows of k_cache");
  p.seqlens.used_k = int32_vector(cache_seqlens, "cache_seqlens", batch, q);
  p.seqlens.leftpad_k = int32_vector(cache_leftpad, "cache_leftpad", batch, q);
  p.seqlens.batch_k = int32_vector(cache_batch_idx, "cache_batch_idx", batch, q);
  p.seqlens.batches_k = count(k_cache.size(0), "batch of k_cache");
  if (block_table) {
    set_pages(p, k_cache, *block_table, q);
  }
  ScoreArguments const arguments{0.0,          softmax_scale, causal,       window_left,
                                 window_right, softcap,       alibi_slopes, s_aux};
  check_numbers(arguments);
  p.mask = mask(arguments, p.seqlens);
  p.scores = scores(arguments, p.seqlens, p.heads_q, q, std::nullopt);

  Tensor query = q;
  if (k) {
    check(cache_seqlens.has_value(), "cache_seqlens says where new keys go");
    check(k->dim() == 4 && k->size(0) == batch && k->size(2) == k_cache.size(2) &&
              k->size(3) == k_cache.size(3),
          "k must be (b, s_new, hk, d) with b of q and hk, d of k_cache");
    check(v->dim() == 4 && v->size(0) == batch && v->size(1) == k->size(1) &&
              v->size(2) == v_cache.size(2) && v->size(3) == v_cache.size(3),
          "v must be (b, s_new, hk, dv) with b, s_new of k and hk, dv of v_cache");
    p.seqlens.new_k = count(k->size(1), "s_new");
    // By what the caller asked for: a window too wide to matter is gone from p.mask.
    bool const local = causal || window_left >= 0 || window_right >= 0;
    query = append(q, p, {k, v, rotary_cos, rotary_sin, rotary_interleaved, local});
    p.q = operand(query, "q", q);
  }
  if (lse.numel() == 0) {
    return {out, lse};
  }
  if (decodes_cache(p, num_splits, current_device())) {
    launch_decode(query, p, num_splits);
  } else {
    launch_forward(query, p);
  }
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  library.impl("_flash_attn_with_kvcache", TORCH_BOX(&with_kvcache));
}

}  // namespace flash::api
