#pragma once

#include "sm90/pipeline.h"

namespace flash::sm90::backward {

// Where the Q, dO and dS of a warpgroup's iteration are in their rings.
template <class Config>
struct RingPositions {
  using OfQ = RingPosition<Config::kQStages>;
  using OfDO = RingPosition<Config::kStages>;
  using OfDS = RingPosition<Config::kScoreStages>;

  uint32_t iterations = 0;  // row blocks so far

  __device__ OfQ q() const { return Config::kAdvances ? q_ : OfQ(iterations); }
  __device__ OfDO dout() const { return Config::kAdvances ? dout_ : OfDO(iterations); }
  __device__ OfDS ds() const { return Config::kAdvances ? ds_ : OfDS(iterations); }

  __device__ void advance() {
    ++iterations;
    q_.advance();
    dout_.advance();
    ds_.advance();
  }

 private:
  OfQ q_{0};
  OfDO dout_{0};
  OfDS ds_{0};
};

}  // namespace flash::sm90::backward
