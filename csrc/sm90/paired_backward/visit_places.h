#pragma once

#include "sm90/pipeline.h"

namespace flash::sm90 {

// Where the Q, dO and dS of a warpgroup's visit are in their rings.
template <class Config>
struct VisitPlaces {
  using OfQ = RingPosition<Config::kQStages>;
  using OfDO = RingPosition<Config::kStages>;
  using OfDS = RingPosition<Config::kScoreStages>;

  uint32_t visits = 0;  // row blocks so far

  __device__ OfQ q() const { return Config::kAdvances ? q_ : OfQ(visits); }
  __device__ OfDO dout() const { return Config::kAdvances ? dout_ : OfDO(visits); }
  __device__ OfDS ds() const { return Config::kAdvances ? ds_ : OfDS(visits); }

  __device__ void advance() {
    ++visits;
    q_.advance();
    dout_.advance();
    ds_.advance();
  }

 private:
  OfQ q_{0};
  OfDO dout_{0};
  OfDS ds_{0};
};

}  // namespace flash::sm90
