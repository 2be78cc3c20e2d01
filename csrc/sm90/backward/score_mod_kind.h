#pragma once

#include "core/dropout.h"
#include "params/scores.h"

namespace flash::sm90::backward {

// Which score mods a loop over row blocks has.
enum class ScoreModKind {
  Cap,   // a softcap alone
  Bias,  // ALiBi alone
  Drop,  // dropout alone, with a probability of a half at most
  Any,   // what the call has
};

__device__ inline ScoreModKind score_mod_kind(Scores const& scores) {
  bool const caps = scores.softcap > 0.f, biased = scores.alibi_slopes,
             drops = scores.dropout_p > 0;
  if (drops && scores.dropout_threshold > HalvesBelow::kLargest) {
    return ScoreModKind::Any;
  }
  if (caps + biased + drops != 1) {
    return ScoreModKind::Any;
  }
  return caps ? ScoreModKind::Cap : biased ? ScoreModKind::Bias : ScoreModKind::Drop;
}

}  // namespace flash::sm90::backward
