// How many pieces to cut a batch into, for each of a sequence's tiles.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash {

// A GPU's multiprocessors, and the thread blocks that each of them holds.
struct Places {
  int sm_count;
  int blocks_per_sm;
};

// A batch of one length, cut into as few pieces as occupy every multiprocessor alike: one or two
// blocks of each read as fast as all that it holds, and leave fewer pieces to be merged. 0 if more
// than a tenth of them would idle, or do less than others, whatever the number.
inline int64_t fewest_columns(int batch, int tiles, Places gpu) {
  for (int64_t blocks = 1; blocks <= gpu.blocks_per_sm; ++blocks) {
    int64_t const columns = blocks * gpu.sm_count / tiles / batch * batch;
    if (10 * columns * tiles >= 9 * blocks * gpu.sm_count) {
      return columns;
    }
  }
  return 0;
}

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

// Sequences that fill the GPU once or several times without being cut, of a batch with more; of so
// many row blocks each.
inline int64_t whole_sequences(int batch, int row_blocks, int64_t resident) {
  int64_t const columns = int64_t(batch) * row_blocks;
  return columns > resident ? columns / resident * resident / row_blocks : 0;
}

// As many for each sequence that the pieces of those that are left, in rounds as long as a piece,
// take the least time. A tenth of a round too much takes none.
inline int64_t columns_for_rest(int batch, int64_t resident) {
  constexpr int64_t kMost = 4;  // the grid has room for as many of all sequences
  int64_t const rest = batch % resident, slack = resident / 10;
  auto const rounds = [&](int64_t each) {
    return std::max<int64_t>((rest * each - slack + resident - 1) / resident, 1);
  };
  int64_t best = 1;
  for (int64_t each = 2; rest > 0 && each <= kMost; ++each) {
    best = rounds(each) * best < rounds(best) * each ? each : best;
  }
  return batch * best;
}

}  // namespace flash
