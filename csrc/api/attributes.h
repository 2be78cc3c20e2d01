// What every op's arguments have in common: counts, windows, and what a score goes through.
#pragma once

#include "api/tensors.h"
#include "params/fwd_params.h"

namespace flash::api {

struct Attributes {
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

// Kernels count rows in ints and add window widths to them.
int count(int64_t n, char const* name);

// Of a call whose lengths are the longest there are.
Mask mask(Attributes const& a, Seqlens const& seqlens);

// Lengths and heads are in `p` already. rng_state: of a call with dropout.
Scores scores(Attributes const& a, FwdParams const& p, Tensor const& q,
              OptionalTensor const& rng_state);

// Compares what the kernel is given: a positive double may be 0 as a float.
inline bool needs_full_scores(Scores const& s) {
  return s.softcap != 0 || s.alibi_slopes || s.s_aux || s.dropout_p > 0 || !(s.softmax_scale > 0);
}

// K and V in pages [count, page_size, hk, d], and the block table [b, n] that lists them; also says
// in p.seqlens.seqlen_k how many keys a sequence can have.
void set_pages(FwdParams& p, Tensor const& k, Tensor const& block_table, Tensor const& q);

}  // namespace flash::api
