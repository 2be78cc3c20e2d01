// Converts the arguments that all attention ops share: lengths, keys, mask, scores.
#pragma once

#include "api/tensors.h"
#include "launch/sm_margin.h"
#include "params/fwd_params.h"

namespace flash::api {

struct ScoreArguments {
  double dropout_p;
  double softmax_scale;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  OptionalTensor const& alibi_slopes;
  OptionalTensor const& s_aux;
};

inline bool divides(int64_t heads_kv, int64_t heads_q) {
  return heads_kv > 0 && heads_q % heads_kv == 0;
}

// n as an int, checked. Kernels count in ints, and add window widths to rows.
int count(int64_t n, char const* name);

// Lengths of q (b, sq, h, d) and k (b, sk, hk, d), v (b, sk, hk, dv), or of the varlen q (total_q,
// h, d), k and v, after a check of their shapes; k and v in pages are (pages, page_size, hk, d).
Seqlens dense_lengths(Tensor const& q, Tensor const& k, Tensor const& v);
Seqlens varlen_lengths(Tensor const& q, Tensor const& k, Tensor const& v,
                       Tensor const& cu_seqlens_q, Tensor const& cu_seqlens_k, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, OptionalTensor const& seqused_k,
                       bool in_pages = false);

// The SMs that a call leaves to others, as long as the result lives.
inline SmMargin margin_of(int64_t sm_margin) {
  require(sm_margin >= 0, "sm_margin", "least", sm_margin, 0);
  return SmMargin(sm_margin);
}

// Sets K and V in pages [count, page_size, hk, d] and the block table [b, n] that lists them; also
// sets p.seqlens.seqlen_k to the most keys that a sequence can have.
void set_pages(FwdParams& p, Tensor const& k, Tensor const& block_table, Tensor const& q);

// Sets K and V and the head dims. The rows of a cache may have any length.
struct KeyTensors {
  Tensor const& k;
  Tensor const& v;
  bool of_cache;
  char const* k_name = "k";
  char const* v_name = "v";
};
void set_keys(FwdParams& p, KeyTensors const& keys, Tensor const& q);

// The descales of a cache of codes: fp32 of each (sequence, KV head), or of each (row of the cache,
// KV head), and a number for all.
struct CodeArguments {
  OptionalTensor const& k_descale;
  OptionalTensor const& v_descale;
  double k_descale_all;
  double v_descale_all;
};

// Sets them, if K and V are codes; p has lengths, heads and keys already.
void set_descales(FwdParams& p, CodeArguments const& codes, KeyTensors const& keys,
                  Tensor const& q);

// Sets qv [b, sq, h, dv] of latent attention, if there is one; p has keys already.
void set_latent_queries(FwdParams& p, OptionalTensor const& qv, Tensor const& q);

// Sets that of q, a number for each (sequence, KV head), or for all; p has lengths and heads
// already.
void set_query_descale(FwdParams& p, OptionalTensor const& q_descale, double q_descale_all,
                       Tensor const& q);

Mask mask(ScoreArguments const& a, Seqlens const& lengths);

// rng_state: only for a call with dropout.
Scores scores(ScoreArguments const& a, Seqlens const& lengths, int heads_q, Tensor const& q,
              OptionalTensor const& rng_state);

void check_numbers(ScoreArguments const& a);

// int64 (2) = [seed, offset] from torch's default generator of q's device. It is drawn on the
// device, so that nothing waits and a captured graph draws anew at each replay.
Tensor draw_rng_state(Tensor const& q);

// The caller's state, checked to be on q's device and int64 (2), or (2 + 3 * batch) for a part of a
// larger call; contiguous, as kernels read it.
Tensor checked_rng_state(Tensor const& rng_state, int batch, Tensor const& q);

// The origins that follow the generator's state if the call is a part of a larger one; otherwise
// null.
DropoutOrigin const* dropout_origins(Tensor const& rng_state);

}  // namespace flash::api
