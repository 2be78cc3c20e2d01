// Split-KV: each thread block finds its piece of the batch's keys from the lengths on the device,
// so that skewed batches are cut evenly, the host waits for nothing, and a captured graph is right
// for whatever lengths it is replayed with. Every block starts with this, so it is about latency:
// divisions in 32 bits, each length read once.
#pragma once

#include <cstdint>

#include "params/common.h"
#include "params/split.h"

namespace flash {

// Keys are counted in units of as many as a thread block takes at a step.
struct UnitRange {
  int begin;
  int end;
};

// One thread block's work: an even share of a tile's units.
struct Piece {
  int sequence;
  int tile;
  int split;
  int splits;
  int first_column;  // column of the tile's split 0; this piece's is first_column + split
  bool valid;        // false for the surplus thread blocks of an upper-bound grid

  // Of `units`; the first pieces get one unit more where they do not share out evenly.
  FLASH_HD UnitRange range(int units) const {
    int const share = units / splits, longer = units - share * splits;
    int const begin = split * share + (split < longer ? split : longer);
    return {begin, begin + share + (split < longer ? 1 : 0)};
  }
};

// A column is one piece of all the tiles of a sequence. Cutting sequence b of units(b) units into
// pieces of `chunk` gives at most units(b) / chunk + 1 of them, and chunk >= total / s.columns, so
// batch + s.columns are enough, whatever the lengths are.
FLASH_HD int64_t num_columns(SplitSchedule const& s) {
  int64_t const by_chunk = int64_t(s.batch) + s.columns;
  int64_t const by_limit = int64_t(s.batch) * s.max_splits;
  return by_chunk < by_limit ? by_chunk : by_limit;
}

FLASH_HD int64_t num_pieces(SplitSchedule const& s) {
  return num_columns(s) * int64_t(s.tiles.divisor);
}

// n / d rounded up, or the largest int: no sequence has more units.
FLASH_HD int divide_up(int64_t n, int d) {
  int64_t const quotient = (n + d - 1) / d;
  return quotient < INT32_MAX ? int(quotient) : INT32_MAX;
}

// A sequence without keys has a piece too: somebody has to write its zeros.
FLASH_HD int num_splits(SplitSchedule const& s, int chunk, int units) {
  uint32_t const splits = (uint32_t(units) + uint32_t(chunk) - 1) / uint32_t(chunk);
  return splits < 1 ? 1 : splits < uint32_t(s.max_splits) ? int(splits) : s.max_splits;
}

// The units of all sequences, for lanes that go through them again and again. Units: callable,
// sequence -> its units.
template <class Lanes, class Units>
struct BatchUnits {
  SplitSchedule const& s;
  Lanes lanes;
  Units units;
  int first;  // of this lane's first sequence, kept

  FLASH_HD BatchUnits(SplitSchedule const& s_, Lanes lanes_, Units units_)
      : s(s_), lanes(lanes_), units(units_) {
    int const b = s.equal ? 0 : lanes.index();
    first = b < s.batch ? units(b) : 0;
  }

  FLASH_HD int of(int sequence) const { return sequence < Lanes::kCount ? first : units(sequence); }

  // Of count(units) over the batch; for all lanes.
  template <class Count>
  FLASH_HD int64_t sum(Count count) const {
    if (s.equal) {
      return int64_t(s.batch) * count(first);
    }
    int64_t mine = 0;
    for (int b = lanes.index(); b < s.batch; b += Lanes::kCount) {
      mine += count(of(b));
    }
    return lanes.sum(mine);
  }
};

// Units of a piece. At first the shortest that make no more pieces than are wanted, which is right
// for a batch of one length, since as many are wanted for each sequence. Others round their pieces
// up to whole ones, so that these are nearly always more than wanted, and a few too many take as
// long as as many again: they are lengthened in proportion, at most three times.
template <class Lanes, class Units>
FLASH_HD int fitting_chunk(BatchUnits<Lanes, Units> const& batch) {
  SplitSchedule const& s = batch.s;
  int const even = divide_up(batch.sum([](int units) { return units; }), s.columns);
  int chunk = even > s.min_units ? even : s.min_units;
  int const columns = s.columns > s.batch ? s.columns : s.batch;
  for (int attempt = 0; attempt < 3; ++attempt) {
    int64_t const found = batch.sum([&](int units) { return num_splits(s, chunk, units); });
    if (found <= columns) {
      break;
    }
    chunk = divide_up(chunk * found, columns);
  }
  return chunk;
}

// The piece of thread block `index`. Lanes: the threads that search together, `kCount` sequences at
// a time; all of them get the answer.
template <class Lanes, class Units>
FLASH_HD Piece find_piece(SplitSchedule const& s, int index, Lanes lanes, Units units) {
  int const column = s.tiles.quotient(index);
  int const tile = s.tiles.remainder(index, column);
  if (s.max_splits == 1) {
    return {column, tile, 0, 1, column, true};
  }
  BatchUnits<Lanes, Units> const batch(s, lanes, units);
  int const chunk = fitting_chunk(batch);
  if (s.equal) {
    int const splits = num_splits(s, chunk, batch.first);
    int const sequence = column / splits, first = sequence * splits;
    return {sequence, tile, column - first, splits, first, sequence < s.batch};
  }
  int before = 0;  // columns of the sequences before `group`
  for (int group = 0; group < s.batch; group += Lanes::kCount) {
    int const b = group + lanes.index();
    int const splits = b < s.batch ? num_splits(s, chunk, batch.of(b)) : 0;
    int const end = before + lanes.running_sum(splits);
    int const hit = lanes.first(column < end);
    if (hit < Lanes::kCount) {
      int const first = lanes.of(hit, end - splits);
      return {group + hit, tile, column - first, lanes.of(hit, splits), first, true};
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
