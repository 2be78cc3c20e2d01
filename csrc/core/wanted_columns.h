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

// Pieces of each row block that is left, at which they take the least time, in rounds as long as a
// piece. A tenth of a round too much takes none.
inline int64_t pieces_of_rest(int64_t rest, int64_t resident) {
  constexpr int64_t kMost = 4;
  int64_t const slack = resident / 10;
  auto const rounds = [&](int64_t each) {
    return std::max<int64_t>((rest * each - slack + resident - 1) / resident, 1);
  };
  int64_t best = 1;
  for (int64_t each = 2; rest > 0 && each <= kMost; ++each) {
    best = rounds(each) * best < rounds(best) * each ? each : best;
  }
  return best;
}

struct BatchShape {
  int batch;
  int own_blocks;  // row blocks of a sequence that have columns of their own
  int tiles;       // of a column

  int row_blocks() const { return std::max(batch * own_blocks, 1); }
};

// Columns that the GPU holds at once.
inline int64_t resident(int tiles, Places gpu) {
  return std::max<int64_t>(gpu.sm_count * gpu.blocks_per_sm / tiles, 1);
}

// Of SplitSchedule (params/split.h), what the host decides.
struct ColumnPlan {
  int columns;
  int extra;
  int whole = 0;
  int blocks_per_sm = 0;
};

// Of a batch that is known to have one length. Nothing is left over.
inline ColumnPlan plan_of_one_length(BatchShape const& shape, Places gpu) {
  int const alike = shape.row_blocks();
  int64_t const few = fewest_columns(alike, shape.tiles, gpu);
  int64_t const columns = few > 0 ? few : wanted_columns(alike, resident(shape.tiles, gpu));
  return {static_cast<int>(columns), static_cast<int>(std::max<int64_t>(columns - alike, 0))};
}

// Of any other. reads_only: blocks wait for keys, and for nothing else. Then two of a
// multiprocessor read as fast as three, with fewer pieces to be merged and fewer places that DRAM
// is read at by turns: if they hold the batch, no third is let in.
inline ColumnPlan plan_columns(BatchShape const& shape, Places gpu, bool reads_only) {
  constexpr int kCalm = 2;
  int const alike = shape.row_blocks();
  Places const calm{gpu.sm_count, std::min(kCalm, gpu.blocks_per_sm)};
  bool const is_calm = reads_only && alike <= resident(shape.tiles, calm);
  int64_t const places = resident(shape.tiles, is_calm ? calm : gpu);
  int64_t const whole = whole_sequences(shape.batch, shape.own_blocks, places);
  int64_t const rest = alike % places, each = pieces_of_rest(rest, places);
  int64_t const columns = whole > 0 ? alike * each : wanted_columns(alike, places);
  int64_t const extra = whole > 0 ? rest * (each - 1) : columns - alike;
  // Whatever is wanted: one sequence may be nearly all of the batch.
  int64_t const least = whole > 0 ? places : (places + 1) / 2;
  return {static_cast<int>(columns), static_cast<int>(std::max(extra, least)),
          static_cast<int>(whole), is_calm ? calm.blocks_per_sm : 0};
}

}  // namespace flash
