// Forward ops: tensors → FwdParams → variant. Schemas are defined in flash_attn/dispatch/ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <utility>

#include "api/arguments.h"
#include "api/direct.h"
#include "api/launches.h"
#include "launch/decode_plan.h"
#include "launch/device.h"
#include "passes/probabilities/launch.h"

namespace flash::api {
namespace {

using torch::stable::clone;
// out, lse, and if the call has them score_output (S_dmask or largest logits) and rng_state, which
// are optional because even an allocation of nothing takes half a microsecond.
using Outputs = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor>;

struct Attributes {
  ScoreArguments score;
  bool return_softmax;
  OptionalTensor const& rng_state;
  bool return_max_logits;
  bool max_logits_of_heads;  // not of rows
  bool may_decode;           // a decode kernel may serve the call
  int64_t num_splits = 0;
  CodeArguments codes;
  OptionalTensor const& qv;
};

// The launches of a call: of the forward kernel, the decode kernel, or both, which then share the
// sequences of a varlen batch.
class AttentionLaunches {
 public:
  AttentionLaunches(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p,
                    Attributes const& a) {
    if (q.numel() == 0 && !p.q_latent.ptr && !a.return_max_logits) {
      return;
    }
    bool has_forward = true, has_decode = false;
    if (a.may_decode && !a.return_max_logits) {
      std::tie(has_forward, has_decode) = divide(p, a.num_splits);
    }
    if (has_forward) {
      copies_ = copy_odd_rows(p, k, v, q);
      forward_.emplace(q, p, a.num_splits);
    }
    if (has_decode) {
      decode_.emplace(q, p, a.num_splits, /*cached=*/false, /*beside=*/has_forward);
    }
  }

  void start(StreamLock const& lock) const {
    if (forward_) {
      forward_->start(lock);
    }
    if (decode_) {
      decode_->start(lock);
    }
  }

 private:
  // Whether the forward kernel has work, and whether the decode kernel has; for a varlen batch it
  // sets in `p` which sequences are decoded.
  static std::pair<bool, bool> divide(FwdParams& p, int64_t num_splits) {
    if (p.q_latent.ptr) {  // which no forward knows
      p.seqlens.few_q = kAllQueries;
      return {false, true};
    }
    int const few_q = decode_plan_of(p, current_device(), num_splits, /*cached=*/false).few_q;
    if (!p.seqlens.cu_q) {
      return {few_q == 0, few_q > 0};
    }
    p.seqlens.few_q = few_q;
    return {few_q != kAllQueries, few_q > 0};
  }

  KeyCopies copies_;
  std::optional<ForwardLaunch> forward_;
  std::optional<DecodeLaunch> decode_;
};

// `p` has lengths, heads and pages already.
Outputs launch(Tensor const& q, Tensor const& k, Tensor const& v, FwdParams p, Attributes const& a,
               Tensor const& out, Tensor const& lse) {
  if (a.return_softmax && p.pages.table) {
    throw std::runtime_error(
        concat(kNotImplemented, "probabilities (return_attn_probs) of keys in pages"));
  }
  require(!(a.return_softmax && a.return_max_logits), "return_max_logits", "excludes",
          "probabilities (return_attn_probs)");
  p.q = operand(q, "q", q);
  KeyTensors const keys{k, v, /*of_cache=*/p.pages.table != nullptr};
  set_keys(p, keys, q);
  set_descales(p, a.codes, keys, q);
  set_latent_queries(p, a.qv, q);
  require(!a.qv || p.seqlens.in_pages, "qv", "needs", "block_table");
  if ((p.codes.used || a.qv) && (a.return_max_logits || a.score.dropout_p > 0)) {
    throw std::runtime_error(
        concat(kNotImplemented, "dropout, and largest logits, of codes (fp8) and with qv"));
  }
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
  OptionalTensor score_output;
  if (a.return_max_logits) {
    score_output = a.max_logits_of_heads ? empty(q, {p.heads_q}, ScalarType::Float)
                                         : torch::stable::empty_like(lse);
    auto* const logits = static_cast<float*>(score_output->data_ptr());
    p.max_logits = a.max_logits_of_heads ? MaxLogits{0, logits} : MaxLogits{logits - p.lse.ptr};
  }
  AttentionLaunches const attention(q, k, v, p, a);
  if (a.return_softmax) {
    Seqlens const& s = p.seqlens;
    score_output = empty(q, {s.batch, p.heads_q, s.seqlen_q, s.seqlen_k}, q.scalar_type());
  }
  StreamLock const lock(current_stream(q));
  attention.start(lock);
  if (a.return_softmax) {
    launch_probabilities(p, dtype_name(q, "q"), score_output->data_ptr(),
                         {current_device(), lock.stream(), "probabilities"});
  }
  return {out, lse, score_output, rng_state};
}

Outputs forward(Tensor q, Tensor k, Tensor v, double dropout_p, double softmax_scale, bool causal,
                int64_t window_left, int64_t window_right, double softcap,
                OptionalTensor alibi_slopes, bool return_softmax, OptionalTensor s_aux,
                OptionalTensor rng_state, bool batch_invariant,
                bool /*deterministic: of the backward it leads to*/, bool return_max_logits,
                bool max_logits_of_heads, int64_t sm_margin) {
  SmMargin const margin = margin_of(sm_margin);
  FwdParams p{};
  p.batch_invariant = batch_invariant;
  p.seqlens = dense_lengths(q, k, v);
  int64_t const batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(2), "heads_k");
  Tensor out = empty(q, {batch, seqlen_q, heads, v.size(3)}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, seqlen_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), heads * seqlen_q, seqlen_q};
  ScoreArguments const score{dropout_p,    softmax_scale, causal,       window_left,
                             window_right, softcap,       alibi_slopes, s_aux};
  OptionalTensor const none;
  return launch(q, k, v, p,
                {score,
                 return_softmax,
                 rng_state,
                 return_max_logits,
                 max_logits_of_heads,
                 /*may_decode=*/!batch_invariant,
                 /*num_splits=*/0,
                 {none, none, 1, 1},
                 none},
                out, lse);
}

Outputs varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
                       double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                       double softcap, OptionalTensor alibi_slopes, bool return_softmax,
                       OptionalTensor block_table, OptionalTensor leftpad_k,
                       OptionalTensor seqused_k, bool /*zero_tensors: always zero*/,
                       OptionalTensor s_aux, OptionalTensor rng_state, bool batch_invariant,
                       bool /*deterministic: of the backward it leads to*/, bool return_max_logits,
                       bool max_logits_of_heads, int64_t sm_margin, int64_t num_splits,
                       OptionalTensor k_descale, OptionalTensor v_descale, double k_descale_all,
                       double v_descale_all, OptionalTensor qv) {
  require(num_splits >= 0, "num_splits", "least", num_splits, 0);
  SmMargin const margin = margin_of(sm_margin);
  FwdParams p{};
  p.batch_invariant = batch_invariant;
  p.seqlens = varlen_lengths(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                             seqused_k, block_table.has_value());
  p.seqlens.leftpad_k = int32_vector(leftpad_k, "leftpad_k", p.seqlens.batch, q);
  int64_t const total_q = q.size(0), heads = q.size(1);
  p.heads_q = count(heads, "heads");
  p.heads_kv = count(k.size(-2), "heads_k");
  if (block_table) {
    set_pages(p, k, *block_table, q);
    // With pages, cu_seqlens_k gives lengths alone, and seqused_k replaces it.
    if (seqused_k) {
      p.seqlens.cu_k = nullptr;
    }
  }
  Tensor out = empty(q, {total_q, heads, in_chunks(v.size(-1))}, q.scalar_type());
  Tensor lse = empty(q, {heads, total_q}, ScalarType::Float);
  p.lse = {static_cast<float*>(lse.data_ptr()), 0, total_q};
  ScoreArguments const score{dropout_p,    softmax_scale, causal,       window_left,
                             window_right, softcap,       alibi_slopes, s_aux};
  return launch(q, k, v, p,
                {score,
                 return_softmax,
                 rng_state,
                 return_max_logits,
                 max_logits_of_heads,
                 /*may_decode=*/true,
                 num_splits,
                 {k_descale, v_descale, k_descale_all, v_descale_all},
                 qv},
                out, lse);
}

// The op for the dispatcher: its schema has no optional results, so missing ones are tensors
// without elements.
template <auto kForward, class = decltype(kForward)>
struct Filled;

template <auto kForward, class... Parameters>
struct Filled<kForward, Outputs (*)(Tensor, Parameters...)> {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> call(Tensor q, Parameters... parameters) {
    auto const [out, lse, score_output, rng_state] = kForward(q, parameters...);
    return {out, lse, score_output ? *score_output : empty(q, {0}, q.scalar_type()),
            rng_state ? *rng_state : empty(q, {0}, ScalarType::Long)};
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&forward, &Filled<&forward>::call>(library, "_flash_attn_forward");
  serve<&varlen_forward, &Filled<&varlen_forward>::call>(library, "_flash_attn_varlen_forward");
}

}  // namespace flash::api
