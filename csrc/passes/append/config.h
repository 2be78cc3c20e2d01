// Types of one append kernel: everything that follows from its row in the variant table.
#pragma once

#include "params/scores.h"
#include "sm80/tensor_core.h"

namespace flash::append {

using namespace cute;

template <class Element_, int kHeadDim_, int kRows_, ScoreLevel>
struct AppendConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;  // of a CTA, one warp each
  static constexpr int kThreads = kRows * 32;
  static constexpr int kChunk = 8;  // elements of a lane: 16 bytes
  static_assert(kHeadDim_ <= 32 * kChunk);
};

template <class Config>
constexpr int kSmemBytes = 0;

}  // namespace flash::append
