// Split-KV: each thread block finds its piece of the batch's keys from the lengths on the device,
// so that skewed batches are cut evenly, the host waits for nothing, and a captured graph is right
// for whatever lengths it is replayed with.
#pragma once

#include <cstdint>

#include "params/common.h"
#include "params/split.h"

namespace flash {

// One thread block's work: units [units * split / splits, units * (split + 1) / splits) of a tile.
struct Piece {
  int sequence;
  int tile;
  int split;
  int splits;
  int64_t first_column;  // column of the tile's split 0; this piece's is first_column + split
  bool valid;            // false for the surplus thread blocks of an upper-bound grid

  FLASH_HD int begin_unit(int units) const { return int(int64_t(units) * split / splits); }
  FLASH_HD int end_unit(int units) const { return int(int64_t(units) * (split + 1) / splits); }
};

// A column is one piece of all the tiles of a sequence. Cutting sequence b of units(b) units into
// pieces of `chunk` gives at most units(b) / chunk + 1 of them, and chunk >= total * tiles /
// wanted, so batch + wanted / tiles columns are enough, whatever the lengths are.
FLASH_HD int64_t num_columns(SplitSchedule const& s) {
  int64_t const by_chunk = s.batch + int64_t(s.wanted / s.tiles);
  int64_t const by_limit = int64_t(s.batch) * s.max_splits;
  return by_chunk < by_limit ? by_chunk : by_limit;
}

FLASH_HD int64_t num_pieces(SplitSchedule const& s) { return num_columns(s) * s.tiles; }

// The shortest pieces, in units, that there may be as many of as are wanted. total: units of all
// sequences.
FLASH_HD int64_t chunk_units(SplitSchedule const& s, int64_t total) {
  int64_t const even = (total * s.tiles + s.wanted - 1) / s.wanted;
  return even > s.min_units ? even : s.min_units;
}

// A sequence without keys has a piece too: somebody has to write its zeros.
FLASH_HD int num_splits(SplitSchedule const& s, int64_t chunk, int units) {
  int64_t const splits = (units + chunk - 1) / chunk;
  return splits < 1 ? 1 : splits < s.max_splits ? int(splits) : s.max_splits;
}

// Units of a piece. Every sequence rounds its pieces up to whole ones, so that the shortest are
// nearly always more than wanted, and a few too many take as long as as many again. By lengthening
// them in proportion three times at most, which is enough for a batch of one length.
template <class Lanes, class Units>
FLASH_HD int64_t fitting_chunk(SplitSchedule const& s, Lanes lanes, Units units) {
  auto const over_batch = [&](auto count) {
    int64_t sum = 0;
    for (int b = lanes.index(); b < s.batch; b += Lanes::kCount) {
      sum += count(units(b));
    }
    return lanes.sum(sum);
  };
  int64_t chunk = chunk_units(s, over_batch([](int units) { return units; }));
  int64_t const columns = s.wanted / s.tiles > s.batch ? s.wanted / s.tiles : s.batch;
  for (int attempt = 0; attempt < 3; ++attempt) {
    int64_t const found = over_batch([&](int units) { return num_splits(s, chunk, units); });
    if (found <= columns) {
      break;
    }
    chunk = (chunk * found + columns - 1) / columns;
  }
  return chunk;
}

// The piece of thread block `index`. Units: callable, sequence -> its units. Lanes: the threads
// that search together, `kCount` sequences at a time; all of them get the answer.
template <class Lanes, class Units>
FLASH_HD Piece find_piece(SplitSchedule const& s, int64_t index, Lanes lanes, Units units) {
  int64_t const column = index / s.tiles;
  int const tile = int(index - column * s.tiles);
  if (s.max_splits == 1) {
    return {int(column), tile, 0, 1, column, true};
  }
  int64_t const chunk = fitting_chunk(s, lanes, units);
  int before = 0;  // columns of the sequences before `group`
  for (int group = 0; group < s.batch; group += Lanes::kCount) {
    int const b = group + lanes.index();
    int const splits = b < s.batch ? num_splits(s, chunk, units(b)) : 0;
    int const end = before + lanes.running_sum(splits);
    int const hit = lanes.first(column < end);
    if (hit < Lanes::kCount) {
      int const first = lanes.of(hit, end - splits);
      return {group + hit, tile, int(column - first), lanes.of(hit, splits), first, true};
    }
    before = lanes.of(Lanes::kCount - 1, end);
  }
  return {0, 0, 0, 1, 0, false};
}

// One thread that searches alone.
struct OneLane {
  static constexpr int kCount = 1;
  FLASH_HD int index() const { return 0; }
  FLASH_HD int64_t sum(int64_t x) const { return x; }
  FLASH_HD int running_sum(int x) const { return x; }
  FLASH_HD int first(bool condition) const { return condition ? 0 : kCount; }
  FLASH_HD int of(int /*lane*/, int x) const { return x; }
};

}  // namespace flash
