// Forward ops: tensors → FwdParams → variant. Schemas are defined in flash_attn/_ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "api/arguments.h"
#include "api/direct.h"
#include "api/forward.h"
#include "api/rng.h"
#include "host/decode_plan.h"
#include "host/device.h"
#include "host/key_splits.h"
#include "host/last_rows.h"
#include "host/select.h"
#include "host/trace.h"
#include "probabilities/launch.h"

namespace flash::api {
namespace {

using torch::stable::clone;
// out, lse, and if the call has them S_dmask and rng_state: an allocation takes half a microsecond,
// also that of nothing.
using Outputs = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor>;

struct Attributes {
  ScoreArguments score;
  bool return_softmax;
  OptionalTensor const& rng_state;
  bool may_decode;  // a decode kernel may serve it
  int64_t num_splits = 0;
};

Request decode_request(Tensor const& q, FwdParams const& p) {
  DeviceInfo const& device = current_device();
  bool const full = p.scores.has_hooks() || p.odd.any();
  return {Direction::Decode, dtype_name(q, "q"),   p.head_dim, p.head_dim_v, full,
          device.sm,         device.smem_per_block};
}

// By the forward kernel, the decode kernel, or each of them what is its of a packed batch.
void launch_attention(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p,
                      int64_t num_splits) {
  DeviceInfo const& device = current_device();
  bool decodes = false, leaves = true;
  if (p.seqlens.cu_q) {
    int const few_q = few_queries(p, num_splits, device);
    decodes = few_q > 0 && find(decode_request(q, p));
    p.seqlens.few_q = decodes ? few_q : 0;
    leaves = p.seqlens.few_q != kAllQueries;
  } else if (decodes_dense(p, device)) {
    decodes = find(decode_request(q, p));
    leaves = !decodes;
  }
  KeyCopies copies;
  if (leaves) {
    copies = copy_odd_rows(p, k, v, q);
    launch_forward(q, p, num_splits);
  }
  if (decodes) {
    launch_decode(q, p, num_splits, /*beside=*/leaves);
  }
}

// Lengths, heads and pages are in `p` already.
Outputs launch(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p, Attributes const& a,
               Tensor const& out, Tensor const& lse) {
  if (a.return_softmax && p.pages.table) {
    throw std::runtime_error(
        concat(kNotImplemented, "probabilities (return_attn_probs) of keys in pages"));
  }
  p.q = operand(q, "q", q);
  set_keys(p, {k, v, /*of_cache=*/p.pages.table != nullptr}, q);
  p.out = view<void>(out, out.data_ptr());
  p.mask = mask(a.score, p.seqlens);
  check_numbers(a.score);
  OptionalTensor rng_state;
  if (a.score.dropout_p > 0) {
    rng_state = a.rng_state ? clone(checked_rng_state(*a.rng_state, p.seqlens.batch, q))
                            : draw_rng_state(q);
  }
  p.scores = scores(a.score, p.seqlens, p.heads_q, q, rng_state);

  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  if (a.may_decode) {
    launch_attention(q, k, v, p, a.num_splits);
  } else {
    KeyCopies const copies = copy_odd_rows(p, k, v, q);
    launch_forward(q, p, a.num_splits);
  }
  OptionalTensor s_dmask;
  if (a.return_softmax) {
    Seqlens const& s = p.seqlens;
    s_dmask = empty(q, {s.batch, p.heads_q, s.seqlen_q, s.seqlen_k}, q.scalar_type());
    launch_probabilities(p, dtype_name(q, "q"), s_dmask->data_ptr(),
                         {current_device(), current_stream(q), "probabilities"});
  }
  return {out, lse, s_dmask, rng_state};
}

Outputs forward(Tensor q, Tensor k, Tensor v, double dropout_p, double softmax_scale, bool causal,
                int64_t window_left, int64_t window_right, double softcap,
                OptionalTensor alibi_slopes, bool return_softmax, OptionalTensor s_aux,
                OptionalTensor rng_state, bool batch_invariant,
                bool /*deterministic: of the backward it leads to*/) {
  FwdParams p{};
  p.batch_invariant = batch_invariant;
  p.seqlens = dense_lengths(q, k, v);
  int64_t const batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(2), "heads_k");
  Tensor out = empty(q, {batch, seqlen_q, heads, v.size(3)}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, seqlen_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), heads * seqlen_q, seqlen_q};
  return launch(
      q, k, v, p,
      {{dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
       return_softmax,
       rng_state,
       !batch_invariant},
      out, lse);
}

Outputs varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
                       double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                       double softcap, OptionalTensor alibi_slopes, bool return_softmax,
                       OptionalTensor block_table, OptionalTensor leftpad_k,
                       OptionalTensor seqused_k, bool /*zero_tensors: always zero*/,
                       OptionalTensor s_aux, OptionalTensor rng_state, bool batch_invariant,
                       bool /*deterministic: of the backward it leads to*/, int64_t num_splits) {
  check(num_splits >= 0, "num_splits is ", num_splits, ", expected 0 or more");
  FwdParams p{};
  p.batch_invariant = batch_invariant;
  p.seqlens = packed_lengths(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                             seqused_k, block_table.has_value());
  p.seqlens.leftpad_k = int32_vector(leftpad_k, "leftpad_k", p.seqlens.batch, q);
  int64_t const total_q = q.size(0), heads = q.size(1);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(-2), "heads_k");
  if (block_table) {
    set_pages(p, k, *block_table, q);
    // Of pages cu_seqlens_k says lengths alone, and nothing where there is a better word on them.
    if (seqused_k) {
      p.seqlens.cu_k = nullptr;
    }
  }
  Tensor out = empty(q, {total_q, heads, in_chunks(v.size(-1))}, q.scalar_type());
  Tensor lse = empty(q, {heads, total_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), 0, total_q};
  return launch(
      q, k, v, p,
      {{dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, s_aux},
       return_softmax,
       rng_state,
       true,
       num_splits},
      out, lse);
}

// As the schema has it, which has no results that may be missing: tensors without elements.
template <auto kForward, class = decltype(kForward)>
struct Filled;

template <auto kForward, class... Parameters>
struct Filled<kForward, Outputs (*)(Tensor, Parameters...)> {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> call(Tensor q, Parameters... parameters) {
    auto const [out, lse, s_dmask, rng_state] = kForward(q, parameters...);
    return {out, lse, s_dmask ? *s_dmask : empty(q, {0}, q.scalar_type()),
            rng_state ? *rng_state : empty(q, {0}, ScalarType::Long)};
  }
};

}  // namespace

namespace {

void launch_in_parts(Tensor const& q, FwdParams p, Variant const& variant, int splits) {
  Scratch const workspace(q, key_splits_workspace(p, splits), ScalarType::Float);
  if (splits > 1) {
    p.splits = place_key_splits(p, splits, workspace.data<float>());
  }
  (variant.launch.paged ? variant.launch.paged : variant.launch.forward)(
      p, {current_device(), current_stream(q), variant.name});
}

// All rows but the last whole, and these in parts beside the others' last round.
void launch_with_last_rows(Tensor const& q, FwdParams const& p, Variant const& variant,
                           LastRows const& last) {
  int const rows = p.seqlens.seqlen_q, whole = rows - last.rows;
  if (whole > 0) {
    launch_in_parts(q, with_rows(p, 0, whole), variant, 1);
  }
  FwdParams behind = with_rows(p, whole, rows);
  behind.early = whole > 0;
  launch_in_parts(q, behind, variant, last.parts);
}

}  // namespace

KeyCopies copy_odd_rows(FwdParams& p, Tensor const& k, Tensor const& v, Tensor const& q) {
  if (!p.odd.any()) {
    return std::nullopt;
  }
  auto const widened = [](Tensor const& t) {
    return torch::stable::pad(t, {0, in_chunks(t.size(-1)) - t.size(-1)});
  };
  KeyCopies copies{{widened(k), widened(v)}};
  set_keys(p, {copies->first, copies->second, /*of_cache=*/true}, q);
  return copies;
}

void launch_forward(Tensor const& q, FwdParams p, int64_t num_splits, bool of_cache) {
  DeviceInfo const& device = current_device();
  bool const paged = p.pages.table;
  // Hopper's loads can end with any key only where rows of all batch entries can be numbered.
  // Strides for which they cannot are rare enough for the other kernels to serve them.
  Seqlens const& s = p.seqlens;
  auto const numbered = [&](TensorView<const void> const& x) {
    return x.numbers_rows(s.batch_k ? s.batches_k : s.batch, s.seqlen_k);
  };
  bool const odd_strides = !paged && s.used_k && !s.cu_k && !(numbered(p.k) && numbered(p.v));
  int const sm = odd_strides ? std::min(device.sm, 80) : device.sm;
  Variant const& variant =
      select({paged ? Direction::Paged : Direction::Fwd, dtype_name(q, "q"), p.head_dim,
              p.head_dim_v, p.scores.has_hooks(), sm, device.smem_per_block, page_layout(p)});
  int const splits = key_splits(p, variant, device, num_splits);
  bool const may_cut_rows = splits == 1 && num_splits == 0 && !of_cache;
  LastRows const last = may_cut_rows ? last_rows(p, variant, device) : LastRows{};
  trace_launch(p, variant, last);
  if (last.rows > 0) {
    launch_with_last_rows(q, p, variant, last);
  } else {
    launch_in_parts(q, p, variant, splits);
  }
}

void launch_decode(Tensor const& q, FwdParams const& p, int64_t num_splits, bool beside,
                   NewRows const& rows) {
  DeviceInfo const& device = current_device();
  Variant const& variant = select(decode_request(q, p));
  constexpr int64_t most = std::numeric_limits<int>::max();
  SplitSchedule const split =
      decode_schedule(variant, p, static_cast<int>(std::min(num_splits, most)), device);
  Scratch const workspace(q, decode_workspace(variant, p, split), ScalarType::Float);
  trace_launch(p, variant);
  variant.launch.decode(decode_params(variant, p, split, workspace.data<float>(), beside, rows),
                        {device, current_stream(q), variant.name});
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&forward, &Filled<&forward>::call>(library, "_flash_attn_forward");
  serve<&varlen_forward, &Filled<&varlen_forward>::call>(library, "_flash_attn_varlen_forward");
}

}  // namespace flash::api
