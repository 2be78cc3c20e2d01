#pragma once

#include <cstdint>

#include "params/common.h"

namespace flash {

// Where a sequence of a call begins in a larger one that the call is a part of, as over several
// GPUs: dropout's bits are those of the whole.
struct DropoutOrigin {
  int64_t batch_head;  // of the first head, in the whole: batch * heads_q + head
  int64_t query;       // multiples of 16, which keep the groups that bits are drawn for
  int64_t key;
};

// What happens to a score between the product q·k and the softmax, and to a probability after it.
struct Scores {
  float softmax_scale;
  float softcap;               // 0: off; else softcap * tanh(score / softcap)
  const float* alibi_slopes;   // [h] or [b, h], of any strides; null: off
  int64_t alibi_batch_stride;  // 0 when the slopes are [h]
  int64_t alibi_head_stride;
  const float* s_aux;                    // [h] logit of each head's sink; null: off
  float dropout_p;                       // 0: off; what the threshold drops
  uint32_t dropout_threshold;            // sixteen random bits below it: dropped
  const int64_t* rng_state;              // [2] seed, offset; read on the device only
  const DropoutOrigin* dropout_origins;  // [b]; null: the call is the whole

  // Compares what the kernel is given: a positive double may be 0 as a float. Sinks join a row when
  // it is finished, at either level.
  FLASH_HD bool has_hooks() const {
    return softcap != 0.f || alibi_slopes || dropout_p > 0.f || !(softmax_scale > 0.f);
  }

  FLASH_HD float alibi_slope(int batch, int head) const {
    return alibi_slopes ? alibi_slopes[batch * alibi_batch_stride + head * alibi_head_stride] : 0.f;
  }
};

}  // namespace flash
