// What the arguments of all attention ops become: lengths, mask, scores.
#pragma once

#include "api/tensors.h"
#include "params/mask.h"
#include "params/scores.h"
#include "params/seqlens.h"

namespace flash::api {

// What a score goes through, as every op takes it.
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

// Kernels count in ints, and rows have window widths added to them.
int count(int64_t n, char const* name);

// Lengths of q (b, sq, h, d) and k (b, sk, hk, d), v (b, sk, hk, dv), or of the packed q (total_q,
// h, d), k and v, after a look at their shapes.
Seqlens dense_lengths(Tensor const& q, Tensor const& k, Tensor const& v);
Seqlens packed_lengths(Tensor const& q, Tensor const& k, Tensor const& v,
                       Tensor const& cu_seqlens_q, Tensor const& cu_seqlens_k, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, OptionalTensor const& seqused_k);

Mask mask(ScoreArguments const& a, Seqlens const& lengths);

// rng_state: of a call with dropout.
Scores scores(ScoreArguments const& a, Seqlens const& lengths, int heads_q, Tensor const& q,
              OptionalTensor const& rng_state);

// Throws what is out of range of the numbers among the arguments.
void check_numbers(ScoreArguments const& a);

bool needs_full_scores(Scores const& s);

}  // namespace flash::api
