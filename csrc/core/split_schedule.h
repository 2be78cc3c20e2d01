// Split-KV: each thread block finds its piece of the batch's keys from the lengths on the device,
// so that skewed batches are cut evenly, the host waits for nothing, and a captured graph is right
// for whatever lengths it is replayed with. Every block starts with this, so it is about latency:
// divisions in 32 bits, each length read once.
#pragma once

#include <cstdint>

#include "core/packed_rows.h"
#include "params/common.h"
#include "params/split.h"

namespace flash {

// Keys are counted in units of as many as a thread block takes at a step.
struct UnitRange {
  int begin;
  int end;
};

// One of `parts` even shares. The first get one unit more where units do not share out evenly.
FLASH_HD UnitRange even_share(UnitRange all, int part, int parts) {
  int const units = all.end - all.begin, share = units / parts, longer = units - share * parts;
  int const begin = all.begin + part * share + (part < longer ? part : longer);
  return {begin, begin + share + (part < longer ? 1 : 0)};
}

// An even share of a tile's units, which is one thread block's work; or all of them, and a
// cluster's, which counts as a block here.
struct Piece {
  int sequence;  // of a packed batch also one of those that the batch has not (see PackedRows)
  int tile;      // of the sequence: KV head + KV heads * row block
  int split;
  int splits;
  int first;   // block of the tile's split 0
  int step;    // from the block of a split to that of the next
  bool valid;  // false for the surplus thread blocks of an upper-bound grid

  FLASH_HD UnitRange range(int units) const { return even_share({0, units}, split, splits); }
};

// A column is one piece of all the tiles of a sequence, or of those of one row block. Cutting
// sequence b of units(b) units into pieces of `chunk` gives at most units(b) / chunk + 1 of them,
// so that batch + s.extra are enough if chunk >= total / s.extra, whatever the lengths are; and
// likewise with row blocks, each of which is cut like a sequence. Few of them are left over if
// lengths are alike: every surplus thread block searches as well, 4 µs on an H200.
FLASH_HD int64_t num_columns(SplitSchedule const& s) {
  int64_t const by_chunk = int64_t(s.all_row_blocks) + s.extra;
  int64_t const by_limit = int64_t(s.all_row_blocks) * s.max_splits;
  return by_chunk < by_limit ? by_chunk : by_limit;
}

FLASH_HD int64_t num_pieces(SplitSchedule const& s) {
  return num_columns(s) * int64_t(s.tiles.divisor);
}

// Those of the launch.
FLASH_HD int64_t num_thread_blocks(SplitSchedule const& s) {
  return num_pieces(s) << s.cluster_log2;
}

// n / d rounded up, or the largest int: no sequence has more units.
FLASH_HD int divide_up(int64_t n, int64_t d) {
  int64_t const quotient = (n + d - 1) / d;
  return quotient < INT32_MAX ? int(quotient) : INT32_MAX;
}

// A sequence without keys has a piece too: a thread block has to write its zeros.
FLASH_HD int num_splits(SplitSchedule const& s, int chunk, int units) {
  uint32_t const splits = (uint32_t(units) + uint32_t(chunk) - 1) / uint32_t(chunk);
  return splits < 1 ? 1 : splits < uint32_t(s.max_splits) ? int(splits) : s.max_splits;
}

// What there is of a sequence.
struct SequenceSize {
  int units;
  int row_blocks;  // that have columns of their own

  FLASH_HD int64_t all_units() const { return int64_t(units) * row_blocks; }
};

// Columns of a sequence, or as many as 32 lanes can still add up.
FLASH_HD int columns_of(SplitSchedule const& s, int chunk, SequenceSize size) {
  constexpr int64_t kMost = 1 << 24;
  int64_t const columns = int64_t(size.row_blocks) * num_splits(s, chunk, size.units);
  return int(columns < kMost ? columns : kMost);
}

// The sizes of all sequences, for lanes that go through them again and again. Sizes: callable,
// sequence -> its size.
template <class Lanes, class Sizes>
struct BatchSizes {
  SplitSchedule const& s;
  Lanes lanes;
  Sizes sizes;
  SequenceSize first;  // of this lane's first sequence, kept

  FLASH_HD BatchSizes(SplitSchedule const& s_, Lanes lanes_, Sizes sizes_)
      : s(s_), lanes(lanes_), sizes(sizes_) {
    int const b = s.equal ? 0 : lanes.index();
    first = b < s.batch ? sizes(b) : SequenceSize{0, 0};
  }

  FLASH_HD SequenceSize of(int sequence) const {
    return sequence < Lanes::kCount ? first : sizes(sequence);
  }

  // The sum of count(size) over the batch, which all lanes get.
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
// up to whole ones, so that these are nearly always more than wanted, and a few too many of one
// length take as long as as many again: they are lengthened in proportion, at most three times, and
// then as far as it takes.
template <class Lanes, class Sizes>
FLASH_HD int fitting_chunk(BatchSizes<Lanes, Sizes> const& batch) {
  SplitSchedule const& s = batch.s;
  int64_t const total = batch.sum([](SequenceSize size) { return size.all_units(); });
  int const even = divide_up(total, s.columns);
  int chunk = even > s.min_units ? even : s.min_units;
  // Rows that belong to no sequence have columns as well.
  int64_t const own_blocks =
      s.packed ? batch.sum([](SequenceSize size) { return size.row_blocks; }) : s.batch;
  int64_t const wanted = s.columns > s.all_row_blocks ? s.columns : s.all_row_blocks;
  int64_t const most = own_blocks + s.extra;
  int64_t columns = wanted < most ? wanted : most;
  // If a quarter longer is not enough either, lengths differ: thread blocks then end one after the
  // other, and those that are too many begin meanwhile, so that all columns that there are may be
  // (48 sequences of up to 16k keys on an H200: 463 µs, each in one piece 549).
  bool const may_differ = columns < most;
  int const first = chunk;
  int64_t of_first = 0;
  for (int attempt = may_differ ? -1 : 0;; ++attempt) {
    int64_t found = batch.sum([&](SequenceSize size) { return columns_of(s, chunk, size); });
    if (found <= columns) {
      return chunk;
    }
    if (attempt < 0) {
      of_first = found;
      chunk = divide_up(5 * int64_t(chunk), 4);
      continue;
    }
    if (attempt == 0 && may_differ) {
      columns = most;
      chunk = first;
      found = of_first;
      if (found <= columns) {
        return chunk;
      }
    }
    if (attempt == 3) {
      break;
    }
    chunk = divide_up(chunk * found, columns);
  }
  int const sure = s.extra > 0 ? divide_up(total, s.extra) : INT32_MAX;
  return chunk > sure ? chunk : sure;
}

// The piece of block `index`. Lanes: the threads that search together, `kCount` sequences at
// a time; all of them get the answer.
template <class Lanes, class Sizes>
FLASH_HD Piece find_piece(SplitSchedule const& s, int index, Lanes lanes, Sizes sizes) {
  int const column = s.tiles.quotient(index);
  int const tile = s.tiles.remainder(index, column), tiles = int(s.tiles.divisor);
  if (s.max_splits == 1 && !s.packed) {
    return {column, tile, 0, 1, index, tiles, true};
  }
  // A sequence alone that is not cut: nothing to search for.
  if (s.max_splits == 1 && s.batch == 1) {
    int const row_blocks = sizes(0).row_blocks;
    if (column < row_blocks) {
      int const place = tile + column * tiles;
      return {0, place, 0, 1, place, row_blocks * tiles, row_blocks <= num_columns(s)};
    }
  }
  BatchSizes<Lanes, Sizes> const batch(s, lanes, sizes);
  int const chunk = s.max_splits == 1 ? INT32_MAX : fitting_chunk(batch);
  if (s.equal) {
    int const splits = num_splits(s, chunk, batch.first.units);
    int const sequence = column / splits, first = sequence * splits;
    return {sequence,          tile, column - first, splits, first * tiles + tile, tiles,
            sequence < s.batch};
  }
  int before = 0;  // columns of the sequences before `group`
  for (int group = 0; group < s.batch; group += Lanes::kCount) {
    int const b = group + lanes.index();
    SequenceSize const size = b < s.batch ? batch.of(b) : SequenceSize{0, 0};
    int const splits = num_splits(s, chunk, size.units);
    int const mine = columns_of(s, chunk, size);
    int const end = before + lanes.running_sum(mine);
    int const hit = lanes.first(column < end);
    if (hit < Lanes::kCount) {
      int const row_blocks = lanes.of(hit, size.row_blocks), all = lanes.of(hit, splits);
      int const count = lanes.of(hit, mine), first = lanes.of(hit, end) - count;
      // Row blocks that read the same keys lie side by side.
      int const split = row_blocks == 1 ? column - first : (column - first) / row_blocks;
      int const row_block = column - first - split * row_blocks;
      // Sequences that overlap may have more row blocks than all rows, and then there are not
      // enough columns. A tile that misses one has none: of a part of the pieces none would be the
      // last.
      bool const complete =
          int64_t(row_blocks) * all == count && int64_t(first) + count <= num_columns(s);
      return {group + hit, tile + row_block * tiles,           split,
              all,         (first + row_block) * tiles + tile, row_blocks * tiles,
              complete};
    }
    before = lanes.of(Lanes::kCount - 1, end);
  }
  for (int b = s.batch; s.packed && b < PackedRows::count(s.batch); ++b) {
    int const row_blocks = sizes(b).row_blocks;
    if (column - before < row_blocks) {
      return {b, tile + (column - before) * tiles, 0, 1, index, tiles, true};
    }
    before += row_blocks;
  }
  return {0, 0, 0, 1, 0, 0, false};
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
