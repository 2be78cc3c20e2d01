// Split-KV: each CTA finds its piece of the batch's keys from the lengths on the device, so that
// skewed batches are cut evenly, the host waits for nothing, and a captured graph is right for
// whatever lengths it is replayed with. Every CTA starts with this, so latency is what counts:
// divisions in 32 bits, each length read once.
#pragma once

#include "core/varlen_rows.h"
#include "params/decode_params.h"

namespace flash {

// A unit is as many keys as a CTA takes in a step.
struct UnitRange {
  int begin;
  int end;
};

// One of `shares` even shares. The first ones get one unit more if units do not divide evenly.
FLASH_HD UnitRange even_share(UnitRange all, int share, int shares) {
  int const units = all.end - all.begin, length = units / shares, longer = units - length * shares;
  int const begin = all.begin + share * length + (share < longer ? share : longer);
  return {begin, begin + length + (share < longer ? 1 : 0)};
}

// An even share of a tile's units, which is the work of one CTA. Where a cluster works on a tile,
// it counts as one CTA here and has all units.
struct Piece {
  int sequence;  // in a varlen batch also one of the two beyond the batch (see VarlenRows)
  int tile;      // of the sequence: KV head + KV heads * row block
  int number;    // the piece's, of its tile
  int count;     // pieces of the tile
  int first;     // CTA of the tile's piece 0
  int step;      // from the CTA of a piece to the next piece's
  bool valid;    // false for the surplus CTAs of an upper-bound grid

  FLASH_HD UnitRange range(int units) const { return even_share({0, units}, number, count); }
};

// A slice is one piece of each tile of a sequence, or of each tile of one row block. Cutting
// sequence b of units(b) units into pieces of `length` units gives at most units(b) / length + 1
// slices, so batch + s.extra slices are enough if length >= total / s.extra, whatever the lengths
// are. The same holds with row blocks, each of which is cut like a sequence. Few slices are left
// over if lengths are alike; every surplus CTA searches as well, 4 µs on an H200.
FLASH_HD int64_t num_slices(PieceSchedule const& s) {
  int64_t const by_length = int64_t(s.all_row_blocks) + s.extra;
  int64_t const by_limit = int64_t(s.all_row_blocks) * s.max_pieces;
  return by_length < by_limit ? by_length : by_limit;
}

FLASH_HD int64_t num_pieces(PieceSchedule const& s) {
  return num_slices(s) * int64_t(s.tiles.divisor);
}

FLASH_HD int64_t num_thread_blocks(PieceSchedule const& s) {
  return num_pieces(s) << s.cluster_log2;
}

// n / d rounded up, or the largest int: no sequence has more units.
FLASH_HD int divide_up(int64_t n, int64_t d) {
  int64_t const quotient = (n + d - 1) / d;
  return quotient < INT32_MAX ? int(quotient) : INT32_MAX;
}

// A sequence without keys has a piece too: a CTA has to write its zeros.
FLASH_HD int pieces_of(PieceSchedule const& s, int length, int units) {
  uint32_t const pieces = (uint32_t(units) + uint32_t(length) - 1) / uint32_t(length);
  return pieces < 1 ? 1 : pieces < uint32_t(s.max_pieces) ? int(pieces) : s.max_pieces;
}

struct SequenceSize {
  int units;
  int row_blocks;  // each has slices of its own

  FLASH_HD int64_t all_units() const { return int64_t(units) * row_blocks; }
};

// Slices of a sequence, or the most that 32 lanes can add up.
FLASH_HD int slices_of(PieceSchedule const& s, int length, SequenceSize size) {
  constexpr int64_t kMost = 1 << 24;
  int64_t const slices = int64_t(size.row_blocks) * pieces_of(s, length, size.units);
  return int(slices < kMost ? slices : kMost);
}

// The sizes of all sequences, for lanes that go through them again and again. Sizes: callable,
// sequence -> its size.
template <class Lanes, class Sizes>
struct BatchSizes {
  PieceSchedule const& s;
  Lanes lanes;
  Sizes sizes;
  SequenceSize first;  // of this lane's first sequence, kept

  FLASH_HD BatchSizes(PieceSchedule const& s_, Lanes lanes_, Sizes sizes_)
      : s(s_), lanes(lanes_), sizes(sizes_) {
    int const b = s.equal ? 0 : lanes.index();
    first = b < s.batch ? sizes(b) : SequenceSize{0, 0};
  }

  FLASH_HD SequenceSize of(int sequence) const {
    return sequence < Lanes::kCount ? first : sizes(sequence);
  }

  // The sum of count(size) over the batch, in all lanes.
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

// Units of a piece. The search starts with the total divided by the slices that are wanted, which
// is right for sequences of one length. With others, each sequence rounds its slices up, so there
// are more than wanted; a few surplus ones may cost a whole wave. So pieces are lengthened: three
// times in proportion, then to what is sure to fit (num_slices).
template <class Lanes, class Sizes>
FLASH_HD int fitting_length(BatchSizes<Lanes, Sizes> const& batch) {
  PieceSchedule const& s = batch.s;
  int64_t const total = batch.sum([](SequenceSize size) { return size.all_units(); });
  int const even = divide_up(total, s.slices);
  int length = even > s.min_units ? even : s.min_units;
  // Rows that belong to no sequence have slices as well.
  int64_t const own_blocks =
      s.varlen ? batch.sum([](SequenceSize size) { return size.row_blocks; }) : s.batch;
  int64_t const wanted = s.slices > s.all_row_blocks ? s.slices : s.all_row_blocks;
  int64_t const most = own_blocks + s.extra;
  int64_t slices = wanted < most ? wanted : most;
  // Attempt -1 asks whether lengths differ: then there are too many pieces even if they are a
  // quarter longer. If they do, CTAs end one after the other, and surplus CTAs begin meanwhile, so
  // all slices may be used (48 sequences of up to 16k keys on an H200: 463 µs; 549 with each
  // sequence in one piece).
  bool const may_differ = slices < most;
  int const first = length;
  int64_t of_first = 0;
  for (int attempt = may_differ ? -1 : 0;; ++attempt) {
    int64_t found = batch.sum([&](SequenceSize size) { return slices_of(s, length, size); });
    if (found <= slices) {
      return length;
    }
    if (attempt < 0) {
      of_first = found;
      length = divide_up(5 * int64_t(length), 4);
      continue;
    }
    if (attempt == 0 && may_differ) {
      slices = most;
      length = first;
      found = of_first;
      if (found <= slices) {
        return length;
      }
    }
    if (attempt == 3) {
      break;
    }
    length = divide_up(length * found, slices);
  }
  int const sure = s.extra > 0 ? divide_up(total, s.extra) : INT32_MAX;
  return length > sure ? length : sure;
}

// The piece of CTA `index`. Lanes: the threads that search together, `kCount` sequences at a time;
// all of them get the answer.
template <class Lanes, class Sizes>
FLASH_HD Piece find_piece(PieceSchedule const& s, int index, Lanes lanes, Sizes sizes) {
  int const slice = s.tiles.quotient(index);
  int const tile = s.tiles.remainder(index, slice), tiles = int(s.tiles.divisor);
  if (s.max_pieces == 1 && !s.varlen) {
    return {slice, tile, 0, 1, index, tiles, true};
  }
  // A single sequence that is not cut needs no search.
  if (s.max_pieces == 1 && s.batch == 1) {
    int const row_blocks = sizes(0).row_blocks;
    if (slice < row_blocks) {
      int const first = tile + slice * tiles;
      return {0, first, 0, 1, first, row_blocks * tiles, row_blocks <= num_slices(s)};
    }
  }
  BatchSizes<Lanes, Sizes> const batch(s, lanes, sizes);
  int const length = s.max_pieces == 1 ? INT32_MAX : fitting_length(batch);
  if (s.equal) {
    int const pieces = pieces_of(s, length, batch.first.units);
    int const sequence = slice / pieces, first = sequence * pieces;
    return {sequence, tile, slice - first, pieces, first * tiles + tile, tiles, sequence < s.batch};
  }
  int before = 0;  // slices of the sequences before `begin`
  for (int begin = 0; begin < s.batch; begin += Lanes::kCount) {
    int const b = begin + lanes.index();
    SequenceSize const size = b < s.batch ? batch.of(b) : SequenceSize{0, 0};
    int const pieces = pieces_of(s, length, size.units);
    int const mine = slices_of(s, length, size);
    int const end = before + lanes.running_sum(mine);
    int const hit = lanes.first(slice < end);
    if (hit < Lanes::kCount) {
      int const row_blocks = lanes.of(hit, size.row_blocks), all = lanes.of(hit, pieces);
      int const count = lanes.of(hit, mine), first = lanes.of(hit, end) - count;
      // Row blocks that read the same keys lie side by side.
      int const number = row_blocks == 1 ? slice - first : (slice - first) / row_blocks;
      int const row_block = slice - first - number * row_blocks;
      // Sequences that overlap may have more row blocks than the tensor, and then there are not
      // enough slices. A tile that lacks one of its slices gets none: without all pieces no CTA
      // would be the last to finish and merge them.
      bool const complete =
          int64_t(row_blocks) * all == count && int64_t(first) + count <= num_slices(s);
      return {begin + hit, tile + row_block * tiles,           number,
              all,         (first + row_block) * tiles + tile, row_blocks * tiles,
              complete};
    }
    before = lanes.of(Lanes::kCount - 1, end);
  }
  for (int b = s.batch; s.varlen && b < VarlenRows::count(s.batch); ++b) {
    int const row_blocks = sizes(b).row_blocks;
    if (slice - before < row_blocks) {
      return {b, tile + (slice - before) * tiles, 0, 1, index, tiles, true};
    }
    before += row_blocks;
  }
  return {0, 0, 0, 1, 0, 0, false};
}

}  // namespace flash
