#pragma once

#include "params/common.h"

namespace flash {

// What a kernel can do to scores. Plain: a positive scale and mask limits. Full: any scale,
// softcap, ALiBi and dropout as well, at the price of registers in the inner loop. Sinks join a row
// when it is finished, in plain kernels too.
enum class ScoreLevel { Plain, Full };

// Where a sequence begins in a larger call that this call is a part of, such as one over several
// GPUs: dropout's bits are those of the larger call.
struct DropoutOrigin {
  int64_t batch_head;  // of the first head, in the larger call: batch * heads_q + head
  int64_t query;       // a multiple of 16, like key, so that dropout's octets are the same
  int64_t key;
};

// The changes to a score between the product q·k and the softmax, and to a probability after it.
struct Scores {
  float softmax_scale;
  float softcap;               // 0: off; otherwise softcap * tanh(score / softcap)
  const float* alibi_slopes;   // [h] or [b, h], of any strides; null: off
  int64_t alibi_batch_stride;  // 0 when the slopes are [h]
  int64_t alibi_head_stride;
  const float* s_aux;                    // [h] logit of each head's sink; null: off
  float dropout_p;                       // 0: off; the exact rate that the threshold drops
  uint32_t dropout_threshold;            // sixteen random bits below it: dropped
  const int64_t* rng_state;              // [2] seed, offset; read on the device only
  const DropoutOrigin* dropout_origins;  // [b]; null: the call is no part of a larger one

  // Compares the floats that the kernel gets: a positive double may be 0 as a float. Sinks join a
  // row when it is finished, with or without score mods.
  FLASH_HD bool has_score_mods() const {
    return softcap != 0.f || alibi_slopes || dropout_p > 0.f || !(softmax_scale > 0.f);
  }

  FLASH_HD float alibi_slope(int batch, int head) const {
    return alibi_slopes ? alibi_slopes[batch * alibi_batch_stride + head * alibi_head_stride] : 0.f;
  }
};

}  // namespace flash
