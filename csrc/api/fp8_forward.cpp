// The forward of codes of 8 bits (e4m3): Q, K and V. Its schema is defined in
// flash_attn/dispatch/fp8.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "api/arguments.h"
#include "api/direct.h"
#include "api/launches.h"

namespace flash::api {
namespace {

// All have whole chunks of 16 bytes: pairs of codes are loaded as numbers of 16 bits.
void set_operands(FwdParams& p, KeyTensors const& keys, Tensor const& q) {
  check_codes(q, "q", q);
  set_keys(p, keys, q);
  require(p.codes.used, "k", "dtype", DtypeOf{keys.k}, DtypeOf{q});
  check_operand(q, "q", q);
  check_operand(keys.k, "k", q);
  check_operand(keys.v, "v", q);
  p.q = view<const void>(q, q.data_ptr());
  p.codes.of_q = true;
}

std::tuple<Tensor, Tensor> fp8_forward(
    Tensor q, Tensor k, Tensor v, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
    OptionalTensor seqused_k, OptionalTensor block_table, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, double softcap, OptionalTensor alibi_slopes, OptionalTensor s_aux,
    bool batch_invariant, int64_t num_splits, OptionalTensor q_descale, OptionalTensor k_descale,
    OptionalTensor v_descale, double q_descale_all, double k_descale_all, double v_descale_all,
    bool fp16_out, int64_t sm_margin) {
  bool const varlen = cu_seqlens_q.has_value();
  require(varlen == cu_seqlens_k.has_value(), "cu_seqlens_q", "with", "cu_seqlens_k");
  require(varlen || !(seqused_k || block_table), "cu_seqlens_q", "with", "seqused_k, block_table");
  require(num_splits >= 0, "num_splits", "least", num_splits, 0);
  SmMargin const margin = margin_of(sm_margin);
  FwdParams p{};
  p.batch_invariant = batch_invariant;
  p.seqlens = varlen ? varlen_lengths(q, k, v, *cu_seqlens_q, *cu_seqlens_k, max_seqlen_q,
                                      max_seqlen_k, seqused_k, block_table.has_value())
                     : dense_lengths(q, k, v);
  p.heads_q = count(q.size(-2), "heads");
  p.heads_kv = count(k.size(-2), "heads_k");
  if (block_table) {
    set_pages(p, k, *block_table, q);
    // With pages, cu_seqlens_k gives lengths alone, and seqused_k replaces it.
    if (seqused_k) {
      p.seqlens.cu_k = nullptr;
    }
  }
  KeyTensors const keys{k, v, /*of_cache=*/true};
  set_operands(p, keys, q);
  set_descales(p, {k_descale, v_descale, k_descale_all, v_descale_all}, keys, q);
  set_query_descale(p, q_descale, q_descale_all, q);
  require(!p.codes.k.of_rows && !p.codes.v.of_rows, "k_descale", "dims", 3, 2);

  ScalarType const dtype = fp16_out ? ScalarType::Half : ScalarType::BFloat16;
  p.codes.bf16_out = !fp16_out;
  int64_t const rows = q.size(varlen ? 0 : 1), heads = p.heads_q;
  Tensor out = varlen ? empty(q, {rows, heads, p.head_dim_v}, dtype)
                      : empty(q, {q.size(0), rows, heads, p.head_dim_v}, dtype);
  Tensor lse = varlen ? empty(q, {heads, rows}, ScalarType::Float)
                      : empty(q, {q.size(0), heads, rows}, ScalarType::Float);
  p.out = view<void>(out, out.data_ptr());
  p.lse = {static_cast<float*>(lse.data_ptr()), varlen ? 0 : heads * rows, rows};
  ScoreArguments const score{0.0,          softmax_scale, causal,       window_left,
                             window_right, softcap,       alibi_slopes, s_aux};
  check_numbers(score);
  p.mask = mask(score, p.seqlens);
  p.scores = scores(score, p.seqlens, p.heads_q, q, std::nullopt);

  torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
  ForwardLaunch const forward(q, p, num_splits);
  StreamLock const lock(current_stream(q));
  forward.start(lock);
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
  serve<&fp8_forward>(library, "_flash_attn_fp8_forward");
}

}  // namespace flash::api
