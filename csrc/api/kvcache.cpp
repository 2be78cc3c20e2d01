// The KV cache op: append and rotate, then attend. Schemas are defined in
// flash_attn/dispatch/ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "api/arguments.h"
#include "api/direct.h"
#include "api/launches.h"
#include "launch/decode_plan.h"
#include "launch/decode_schedule.h"
#include "launch/device.h"
#include "launch/select.h"

namespace flash::api {
namespace {

struct Appended {
  OptionalTensor const& k;  // (b, s_new, hk, d)
  OptionalTensor const& v;
  OptionalTensor const& rotary_cos;  // (positions, rotary_dim / 2)
  OptionalTensor const& rotary_sin;
  bool rotary_interleaved;
  bool advance_q;  // query i rotates by i more than query 0
};

void const* rotary_table(Tensor const& t, char const* name, Tensor const& like, Tensor const& q) {
  check_on_device_of(t, name, q);
  require(t.scalar_type() == q.scalar_type() && t.dim() == 2 && t.size(0) == like.size(0) &&
              t.size(1) == like.size(1) && (t.size(1) == 1 || t.stride(1) == 1),
          name, "table", t);
  return t.data_ptr();
}

Rotary rotary(Appended const& a, FwdParams const& p, Tensor const& q) {
  Rotary r{};
  require(a.rotary_cos.has_value() == a.rotary_sin.has_value(), "rotary_cos", "with", "rotary_sin");
  if (a.rotary_cos) {
    Tensor const& cos = *a.rotary_cos;
    r.cos = rotary_table(cos, "rotary_cos", cos, q);
    r.sin = rotary_table(*a.rotary_sin, "rotary_sin", cos, q);
    require(cos.size(0) > 0 && cos.size(1) > 0 && 2 * cos.size(1) <= p.head_dim, "rotary_cos",
            "table", cos);
    r.cos_stride = cos.stride(0);
    r.sin_stride = a.rotary_sin->stride(0);
    r.positions = count(cos.size(0), "positions of rotary_cos");
    r.rotary_dim = static_cast<int>(2 * cos.size(1));
    r.interleaved = a.rotary_interleaved;
    r.advance_q = a.advance_q;
  }
  return r;
}

// A dimension that divides, also where there is nothing to divide.
FastDiv divisor(int64_t n) { return FastDiv(static_cast<int>(std::max<int64_t>(n, 1))); }

NewRows new_rows(Tensor const& q, FwdParams const& p, Appended const& a) {
  auto const writable = [](TensorView<const void> const& x) -> TensorView<void> {
    return {const_cast<void*>(x.ptr), x.batch_stride, x.row_stride, x.head_stride};
  };
  NewRows rows{};
  rows.rotary = rotary(a, p, q);
  rows.q = p.q;
  rows.k = operand(*a.k, "k", q);
  rows.v = operand(*a.v, "v", q);
  rows.k_cache = writable(p.k);
  rows.v_cache = writable(p.v);
  rows.codes = p.codes;
  rows.odd = p.odd.any();
  rows.columns_k = rows.odd ? p.odd.columns_k : p.head_dim;
  rows.columns_v = rows.odd ? p.odd.columns_v : p.head_dim_v;
  return rows;
}

// Writes the new rows before attention reads them. The stream's lock is not needed: the launch is
// not early, and odd rows are copied after it.
void launch_append(Tensor const& q, FwdParams const& p, NewRows const& rows) {
  AppendParams n{};
  n.rows = rows;
  n.pages = p.pages;
  n.seqlens = p.seqlens;
  n.seqlen_q = divisor(p.seqlens.seqlen_q);
  n.new_k = divisor(p.seqlens.new_k);
  n.heads_q = divisor(p.heads_q);
  n.heads_kv = divisor(p.heads_kv);
  n.head_dim = p.head_dim;
  int64_t const batch = p.seqlens.batch;
  n.queries = rows.rotary.cos ? batch * p.seqlens.seqlen_q * p.heads_q : 0;
  n.keys = batch * p.seqlens.new_k * p.heads_kv;
  DeviceInfo const& device = current_device();
  Variant const& variant = select({Direction::Append, dtype_name(q, "q"), p.head_dim, p.head_dim_v,
                                   /*full_scores=*/false, device.sm, device.smem_per_block});
  FirstLaunch const first(variant, device);
  trace_launch(p, variant);
  variant.launch.append(n, {device, current_stream(q), variant.name});
}

std::tuple<Tensor, Tensor> with_kvcache(
    Tensor q, Tensor k_cache, Tensor v_cache, OptionalTensor k, OptionalTensor v,
    OptionalTensor rotary_cos, OptionalTensor rotary_sin, OptionalTensor cache_seqlens,
    OptionalTensor cache_batch_idx, OptionalTensor cache_leftpad, OptionalTensor block_table,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    bool rotary_interleaved, OptionalTensor alibi_slopes, int64_t num_splits, OptionalTensor s_aux,
    int64_t sm_margin, OptionalTensor k_descale, OptionalTensor v_descale, double k_descale_all,
    double v_descale_all, OptionalTensor qv) {
  SmMargin const margin = margin_of(sm_margin);
  require(q.dim() == 4, "q", "dims", q.dim(), 4);
  int64_t const batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  // q's d is rounded up to a multiple of 8.
  require(k_cache.dim() == 4 && divides(k_cache.size(2), heads) &&
              in_chunks(k_cache.size(3)) == q.size(3),
          "k_cache", "shape", k_cache, "q", q);
  require(v_cache.dim() == 4 && v_cache.size(0) == k_cache.size(0) &&
              v_cache.size(1) == k_cache.size(1) && v_cache.size(2) == k_cache.size(2),
          "v_cache", "shape", v_cache, "k_cache", k_cache);
  require(!block_table || !cache_batch_idx, "cache_batch_idx", "excludes", "block_table");
  require(block_table || cache_batch_idx || k_cache.size(0) == batch, "k_cache", "shape", k_cache,
          "q", q);
  require(num_splits >= 0, "num_splits", "least", num_splits, 0);
  require(k.has_value() == v.has_value(), "k", "with", "v");
  require(k || !rotary_cos, "rotary_cos", "needs", "new keys k");
  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  Tensor out = empty(q, {batch, seqlen_q, heads, in_chunks(v_cache.size(3))}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, seqlen_q}, ScalarType::Float);

  FwdParams p{};
  p.q = operand(q, "q", q);
  KeyTensors const keys{k_cache, v_cache, /*of_cache=*/true, "k_cache", "v_cache"};
  set_keys(p, keys, q);
  p.out = view<void>(out, out.data_ptr());
  p.lse = {static_cast<float*>(lse.data_ptr()), heads * seqlen_q, seqlen_q};
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k_cache.size(2), "heads_k");
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
  set_descales(p, {k_descale, v_descale, k_descale_all, v_descale_all}, keys, q);
  set_latent_queries(p, qv, q);
  ScoreArguments const arguments{0.0,          softmax_scale, causal,       window_left,
                                 window_right, softcap,       alibi_slopes, s_aux};
  check_numbers(arguments);
  p.mask = mask(arguments, p.seqlens);
  p.scores = scores(arguments, p.seqlens, p.heads_q, q, std::nullopt);

  NewRows rows{};
  if (k) {
    require(cache_seqlens.has_value(), "k", "needs", "cache_seqlens");
    require(k->dim() == 4 && k->size(0) == batch && k->size(2) == k_cache.size(2) &&
                k->size(3) == q.size(3),
            "k", "shape", *k, "k_cache", k_cache);
    require(v->dim() == 4 && v->size(0) == batch && v->size(1) == k->size(1) &&
                v->size(2) == v_cache.size(2) && v->size(3) == out.size(3),
            "v", "shape", *v, "k", *k);
    p.seqlens.new_k = count(k->size(1), "s_new");
    // As the caller asked: p.mask has lost a window too wide to matter.
    bool const local = causal || window_left >= 0 || window_right >= 0;
    rows = new_rows(q, p, {k, v, rotary_cos, rotary_sin, rotary_interleaved, local});
  }
  Tensor query = q;
  auto const rotate_before = [&] {
    query = empty(q, {batch, seqlen_q, heads, q.size(3)}, q.scalar_type());
    rows.q_rotated = view<void>(query, query.data_ptr());
    p.q = operand(query, "q", q);
  };
  bool const decode_may_append = decode_appends(p, rows);
  if (rotary_cos && !decode_may_append) {
    rotate_before();
  }
  // p is as DecodeLaunch gets it, which finds the plan that is made here and makes no other.
  bool const attends = lse.numel() > 0;
  // No forward knows q_latent: where no row of latent attention fits, DecodeLaunch says so.
  bool const decodes =
      attends && (p.q_latent.ptr ||
                  decode_plan_of(p, current_device(), num_splits, /*cached=*/true).few_q > 0);
  if (k && !(decodes && decode_may_append)) {
    if (rotary_cos && decode_may_append) {
      rotate_before();  // the forward kernels rotate nothing
    }
    launch_append(q, p, rows);
    rows = {};
  }
  if (decodes) {
    DecodeLaunch const decode(query, p, num_splits, /*cached=*/true, /*beside=*/false, rows);
    decode.start(StreamLock(current_stream(q)));
  } else if (attends) {
    KeyCopies const copies = copy_odd_rows(p, k_cache, v_cache, q);
    ForwardLaunch const forward(query, p, num_splits, /*of_cache=*/true);
    forward.start(StreamLock(current_stream(q)));
  }
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&with_kvcache>(library, "_flash_attn_with_kvcache");
}

}  // namespace flash::api
