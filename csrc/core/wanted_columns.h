// How many pieces to cut a batch into, for each of a sequence's tiles.
#pragma once

#include <cstdint>

namespace flash {

// As many for each sequence, at which a batch of one length is cut: as fill the GPU once
// (`resident`, at least 1), unless whole pieces of each sequence leave more than a tenth of it
// idle; then the first of up to four times that leaves less, or the best of them. Where even that
// is fewer than sequences, no number is right.
inline int64_t wanted_columns(int batch, int64_t resident) {
  constexpr int kMostRounds = 4;
  constexpr double kEnough = 0.9;
  int64_t best = resident;
  double best_used = 0.;
  for (int rounds = 1; rounds <= kMostRounds && best_used < kEnough; ++rounds) {
    int64_t const whole = rounds * resident / batch * batch;
    double const used = double(whole) / double(rounds * resident);
    if (used > best_used) {
      best = whole;
      best_used = used;
    }
  }
  return best;
}

}  // namespace flash
