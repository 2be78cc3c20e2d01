// How many pieces to cut a batch into, for each of a sequence's tiles.
#pragma once

#include <cstdint>

namespace flash {

// For a batch of one length, what fills the GPU once (`resident`, at least 1), unless whole pieces
// of each sequence leave more than a tenth of it idle; then the first of up to four times that
// leaves less, or the best of them.
inline int64_t wanted_columns(int batch, int64_t resident) {
  constexpr int kMostRounds = 4;
  constexpr double kEnough = 0.9;
  auto const used = [&](int64_t columns) {
    return double(columns / batch * batch) / double(columns);
  };
  int64_t best = 0;
  for (int64_t columns = resident; columns <= kMostRounds * resident; columns += resident) {
    if (columns >= batch && (best == 0 || (used(best) < kEnough && used(columns) > used(best)))) {
      best = columns;
    }
  }
  return best > 0 ? best : resident;
}

}  // namespace flash
