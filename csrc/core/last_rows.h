// Tiles of equal length seldom fill the last round of a launch. Where its empty places are worth
// two more launches, the last row blocks are cut along the keys: their parts fill the round, a
// whole tile's end or not.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/work_tile.h"

namespace flash {

// Row blocks of a call, or parts of some of them.
struct EqualTiles {
  int64_t count;
  double time;  // of one, µs
};

// Until `takers`, each of which takes a tile as soon as it is done with one, are done with all
// whole tiles, and behind them with the parts. One that finds no more whole tiles starts with
// parts, and takes as long as `start` for it.
inline double time_of_all(EqualTiles whole, EqualTiles parts, int takers, double start) {
  constexpr double kRounding = 1e-6;  // µs
  int64_t const late = whole.count % takers, soon = takers - late;
  double const rounds = double(whole.count / takers) * whole.time;
  double const last_whole = late > 0 ? whole.time : 0;
  if (parts.count == 0) {
    return rounds + last_whole;
  }
  auto const turns = [&](double time) {
    return static_cast<int64_t>(std::max(time + kRounding, 0.) / parts.time);
  };
  auto const are_done = [&](double time) {
    return soon * turns(time) + late * turns(time - whole.time) >= parts.count;
  };
  // Could parts be cut at will, by those who were done soon alone, or with the others. The last one
  // ends with the former, or with the latter.
  double const work = double(parts.count) * parts.time;
  double const even = std::min(work / double(soon), (work + double(late) * whole.time) / takers);
  auto const end_with = [&](double begin) {
    double time = begin + double(turns(even - begin)) * parts.time;
    while (!are_done(time)) {
      time += parts.time;
    }
    return time;
  };
  double const end = late > 0 ? std::min(end_with(0), end_with(whole.time)) : end_with(0);
  return rounds + std::max(start + end, last_whole);
}

// A call all of whose row blocks see all keys.
struct EqualRowBlocks {
  int rows;  // of a sequence
  int block_m;
  int64_t columns;   // row blocks of the same rows: heads of all sequences
  int part_block_m;  // of the kernel that cuts them along the keys
  int64_t part_columns;
  int takers;
  double tile_time;  // µs
  int part_steps;    // of a row block of that kernel, all parts together
  double step_time;
  double part_time;    // what a part takes beside its steps
  double row_of_part;  // what merging takes, for each row of each part
  int64_t most_rows;   // of parts, that memory is to be taken for
};

// The last rows of each sequence, and into how many parts their keys are cut.
struct LastRows {
  int rows;  // 0: none are cut
  int parts;
};

// Beside the rows, µs: until the first thread blocks with parts have their first keys, and from the
// last part to the end of the merging launch. Of 17 calls on an H200 these leave the difference
// from all row blocks whole 3 µs too good on average.
constexpr double kStartTime = 5, kMergeTime = 8;

inline double time_with(EqualRowBlocks const& b, LastRows const& last) {
  int64_t const whole = (b.rows - last.rows) / b.block_m * b.columns;
  int64_t const parts = num_m_blocks(last.rows, b.part_block_m) * b.part_columns * last.parts;
  int const steps = (b.part_steps + last.parts - 1) / last.parts;
  double const merged = double(parts) * b.part_block_m * b.row_of_part;
  return time_of_all({whole, b.tile_time}, {parts, steps * b.step_time + b.part_time}, b.takers,
                     kStartTime) +
         kMergeTime + merged;
}

// Those that take least time, if that is less by enough than all row blocks whole.
inline LastRows best_last_rows(EqualRowBlocks const& b) {
  constexpr double kGain = 0.025;
  constexpr int kMostParts = 8, kLeastSteps = 2, kCuts = 8;
  int const row_blocks = num_m_blocks(b.rows, b.block_m);
  int64_t const tiles = row_blocks * b.columns, over = tiles % b.takers;
  double least = (1 - kGain) * time_of_all({tiles, b.tile_time}, {0, 0}, b.takers, 0);
  LastRows best{};
  // What is left to gain were no place empty.
  if (over == 0 || double(tiles) / b.takers * b.tile_time + kStartTime + kMergeTime >= least) {
    return best;
  }
  // Those of the last round, up to those of the last two.
  auto const blocks_of = [&](int64_t count) { return (count + b.columns - 1) / b.columns; };
  int64_t const most = std::min<int64_t>(blocks_of(over + b.takers), row_blocks);
  int64_t const apart = (most - blocks_of(over)) / kCuts + 1;
  for (int64_t cut = blocks_of(over); cut <= most; cut += apart) {
    int const rows = b.rows - static_cast<int>(row_blocks - cut) * b.block_m;
    int64_t const by_memory = b.most_rows / (rows * b.columns);
    int64_t const most_parts =
        std::min<int64_t>({kMostParts, b.part_steps / kLeastSteps, by_memory});
    for (int parts = 2; parts <= most_parts; ++parts) {
      double const time = time_with(b, {rows, parts});
      if (time < least) {
        least = time;
        best = {rows, parts};
      }
    }
  }
  return best;
}

}  // namespace flash
