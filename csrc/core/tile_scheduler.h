// Which tiles a CTA computes, in which order: iterators for dense calls and for varlen ones.
#pragma once

#include "core/work_tile.h"

namespace flash {

// A scheduler is an iterator over the tiles of one CTA:
//
//     for (DenseScheduler tiles(schedule, blockIdx.x, gridDim.x); tiles.valid(); tiles.next()) {
//         WorkTile const tile = tiles.coord();
//         ...
//     }
//
// Tiles are numbered along one dimension (grid y and z end at 65,535) and a CTA takes every
// gridDim.x-th one. One tile per CTA, a persistent grid, and more tiles than a grid can have CTAs
// are therefore the same code.

constexpr int64_t max_grid_blocks = 2147483647;  // gridDim.x

// The most strips side by side, up to `most`, that leave no small rest: a few strips would run at
// the end, while most of the GPU is idle.
FLASH_HD int even_group(int most, int64_t num_strips) {
  int64_t const times = (num_strips + most - 1) / most;
  return times > 1 ? int((num_strips + times - 1) / times) : most;
}

// ---- every sequence has the same length -------------------------------------------------------

// Fixed by the host for a launch.
struct DenseSchedule {
  int m_blocks;  // row blocks per sequence
  int heads;     // query heads
  int batch;
  TileOrder order;

  FLASH_HD int64_t strips() const { return int64_t(heads) * batch; }
  FLASH_HD int64_t num_tiles() const { return strips() * m_blocks; }
};

// Index: the type that counts tiles (see tile_at).
template <class Index = int64_t>
class DenseScheduler {
 public:
  FLASH_HD DenseScheduler(DenseSchedule const& schedule, int64_t block, int64_t num_blocks)
      : schedule_(schedule), index_(Index(block)), stride_(Index(num_blocks)) {}

  FLASH_HD bool valid() const { return index_ < schedule_.num_tiles(); }

  FLASH_HD void next() { index_ += stride_; }

  FLASH_HD WorkTile coord() const {
    if (!valid()) return {0, 0, 0, false};
    auto const [m_block, strip] =
        tile_at<Index>(schedule_.order, index_, schedule_.m_blocks, Index(schedule_.strips()));
    Index const batch = strip / schedule_.heads;
    return {m_block, int(strip - batch * schedule_.heads), int(batch), true};
  }

 private:
  DenseSchedule schedule_;
  Index index_;
  Index stride_;
};

// ---- lengths are known only on the device -----------------------------------------------------

// Fixed by the host, which knows the total number of rows and must not wait for the lengths.
//
// Sequence b, before which start(b) rows come, owns the row blocks from first_block(b) = start(b) /
// block_m + b on. These are enough: with start(b) = x * block_m + r, first_block(b + 1) -
// first_block(b) = (r + length) / block_m + 1 >= ceil(length / block_m). So no prefix sum over
// lengths is needed, and a tile finds its sequence by bisection. The surplus blocks, at most one or
// two a sequence, are invalid tiles.
//
// Where another kernel computes the sequences of up to `few` rows, a block for each of them would
// be too many if they are most of a batch. Without these blocks, first_block(b) = start(b) / w: a
// sequence of k * block_m + 1 rows or more has k + 1 blocks if w <= (block_m + 1) / 2, and a
// sequence of few + 1 rows has one block if w <= few + 1.
struct VarlenSchedule {
  int64_t total_q;  // rows of all sequences together
  int block_m;
  int heads;  // query heads
  int batch;  // sequences
  TileOrder order;
  int rows_apart;   // rows from the number of one block to the next
  int shared_till;  // sequences before this one have no block for themselves
  int64_t tiles;    // kept: a GPU divides 64 bits in the time of a load from L2

  static VarlenSchedule of(int64_t total_q, int block_m, int heads, int batch, TileOrder order) {
    return counted({total_q, block_m, heads, batch, order, block_m, 0, 0});
  }

  // Without blocks for those of the first `sequences` sequences that have up to `few` rows.
  static VarlenSchedule of(int64_t total_q, int block_m, int heads, int batch, TileOrder order,
                           int few, int sequences) {
    int const half = (block_m + 1) / 2, rows_apart = few < half ? few + 1 : half;
    return counted({total_q, block_m, heads, batch, order, rows_apart, sequences, 0});
  }

  template <class Index>
  FLASH_HD Index first_block(int sequence, Index start) const {
    return start / rows_apart + (sequence > shared_till ? sequence - shared_till : 0);
  }
  FLASH_HD int64_t num_tiles() const { return tiles; }

 private:
  static VarlenSchedule counted(VarlenSchedule schedule) {
    schedule.tiles = schedule.first_block(schedule.batch, schedule.total_q) * schedule.heads;
    return schedule;
  }
};

// The result of a search: a sequence, and where it and the next one start.
struct SequencePlace {
  int sequence;
  int start;
  int next_start;
};

// Finds the last sequence of [0, count) for which is_behind is false. It is false for 0, and all
// sequences for which it is true come after the others. rows.start(0) = 0 is the least start,
// rows.start(count) the greatest.
//
// A start that decreases is clamped to the starts that the search has read on its way. These are
// the same in every search that gets there, so any starts are searched like starts that do not
// decrease, and every row block is found once. Row blocks that wait for earlier ones of their
// sequence need that.
struct Bisection {
  template <class Rows, class IsBehind>
  FLASH_HD SequencePlace operator()(int count, Rows const& rows, IsBehind is_behind) const {
    int low = 0, high = count;  // low: not behind, high: behind
    int low_start = 0, high_start = rows.start(count);
    while (high - low > 1) {
      int const middle = low + (high - low) / 2;
      int start = rows.start(middle);
      start = start > low_start ? start : low_start;
      start = start < high_start ? start : high_start;
      bool const behind = is_behind(middle, start);
      (behind ? high : low) = middle;
      (behind ? high_start : low_start) = start;
    }
    return {low, low_start, high_start};
  }
};

// Sequences run in order; inside one, all heads and row blocks run in the dense order.
// Index: the type that counts tiles.
// Rows: like RowOrder.
// Search: finds a tile's sequence, like Bisection.
template <class Index, class Rows, class Search = Bisection>
class VarlenScheduler {
 public:
  FLASH_HD VarlenScheduler(VarlenSchedule const& schedule, Rows const& rows, Index block,
                           std::type_identity_t<Index> num_blocks, Search search = {})
      : schedule_(schedule), rows_(rows), index_(block), stride_(num_blocks), search_(search) {}

  FLASH_HD bool valid() const { return index_ < schedule_.num_tiles(); }

  FLASH_HD void next() { index_ += stride_; }

  FLASH_HD WorkTile coord() const {
    if (!valid()) return {0, 0, 0, false};
    int const row_block = int(index_ / schedule_.heads);
    SequencePlace const place = search_(schedule_.batch, rows_, [&](int sequence, int start) {
      return schedule_.first_block(sequence, start) > row_block;
    });
    int const sequence = place.sequence;
    int const first = schedule_.first_block(sequence, place.start);
    int const end = schedule_.first_block(sequence + 1, place.next_start);
    // If starts decrease, a search other than Bisection may end beside the row block.
    if (row_block < first || row_block >= end) return {0, 0, sequence, false};
    auto const [m_block, head] = tile_at<Index>(
        schedule_.order, index_ - Index(first) * schedule_.heads, end - first, schedule_.heads);
    int const length = rows_.wanted(sequence, place.next_start - place.start);
    return {m_block, int(head), sequence, m_block * schedule_.block_m < length};
  }

 private:
  VarlenSchedule schedule_;
  Rows rows_;
  Index index_;
  Index stride_;
  Search search_;
};

}  // namespace flash
