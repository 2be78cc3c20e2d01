#pragma once

#include <cstdint>

#include "core/warp.h"
#include "core/work_tile.h"
#include "params/common.h"

namespace flash {

// A scheduler is an iterator over the tiles of one thread block:
//
//     for (DenseScheduler tiles(schedule, blockIdx.x, gridDim.x); tiles.valid(); tiles.next()) {
//         WorkTile const tile = tiles.coord();
//         ...
//     }
//
// Tiles are numbered along one dimension (grid y and z end at 65,535) and a block takes every
// gridDim.x-th one. One tile per block, a persistent grid, and more tiles than a grid can have
// blocks are therefore the same code.

constexpr int64_t max_grid_blocks = 2147483647;  // gridDim.x

FLASH_HD int grid_blocks(int64_t num_tiles) {
  return int(num_tiles < max_grid_blocks ? num_tiles : max_grid_blocks);
}

// Query heads to run side by side: as many as have their K and V in L2 together. heads_per_kv query
// heads share one K and V. At least one, and not more than there are.
FLASH_HD int l2_group(int64_t l2_bytes, int64_t kv_bytes_per_head, int heads_per_kv,
                      int64_t num_columns) {
  int64_t const kv_heads = kv_bytes_per_head > 0 ? l2_bytes / kv_bytes_per_head : num_columns;
  int64_t group = (kv_heads > 1 ? kv_heads : 1) * heads_per_kv;
  group = group < num_columns ? group : num_columns;
  constexpr int64_t largest_int = 2147483647;
  group = group < largest_int ? group : largest_int;
  return int(group > 1 ? group : 1);
}

// ---- every sequence has the same length -------------------------------------------------------

// Fixed by the host for a launch.
struct DenseSchedule {
  int m_blocks;  // row blocks per sequence
  int heads;     // query heads
  int batch;
  TileOrder order;

  FLASH_HD int64_t columns() const { return int64_t(heads) * batch; }
  FLASH_HD int64_t num_tiles() const { return columns() * m_blocks; }
};

class DenseScheduler {
 public:
  FLASH_HD DenseScheduler(DenseSchedule const& schedule, int64_t block, int64_t num_blocks)
      : schedule_(schedule), index_(block), stride_(num_blocks) {}

  FLASH_HD bool valid() const { return index_ < schedule_.num_tiles(); }

  FLASH_HD void next() { index_ += stride_; }

  FLASH_HD WorkTile coord() const {
    if (!valid()) return {0, 0, 0, false};
    auto const [m_block, column] =
        tile_at(schedule_.order, index_, schedule_.m_blocks, schedule_.columns());
    int64_t const batch = column / schedule_.heads;
    return {m_block, int(column - batch * schedule_.heads), int(batch), true};
  }

 private:
  DenseSchedule schedule_;
  int64_t index_;
  int64_t stride_;
};

// ---- lengths are known only on the device -----------------------------------------------------

// Fixed by the host, which knows the total number of rows and must not wait for the lengths: the
// grid is an upper bound, and the tiles past the real number, all at its end, are invalid.
struct VarlenSchedule {
  int total_q;  // rows of all sequences together
  int block_m;
  int heads;  // query heads
  int batch;  // sequences
  TileOrder order;

  FLASH_HD int64_t max_tiles() const {
    // sum ceil(n / m) <= sum (n + m - 1) / m, and the left side is an integer.
    return (total_q + int64_t(batch) * (block_m - 1)) / block_m * heads;
  }
};

// Sequences run in order; inside one, all heads and row blocks run in the dense order.
// SeqlenQ: callable, sequence -> its number of query rows. In a kernel whole warps have to call the
// constructor and next().
template <class SeqlenQ>
class VarlenScheduler {
 public:
  FLASH_HD VarlenScheduler(VarlenSchedule const& schedule, SeqlenQ seqlen_q, int64_t block,
                           int64_t num_blocks)
      : schedule_(schedule), seqlen_q_(seqlen_q), index_(block), stride_(num_blocks) {
    find();
  }

  FLASH_HD bool valid() const { return tile_.valid; }

  FLASH_HD void next() {
    index_ += stride_;
    find();
  }

  FLASH_HD WorkTile coord() const { return tile_; }

 private:
  // Looks at 32 sequences at a time, and goes on where the last search ended: indices only grow.
  FLASH_HD void find() {
    tile_ = {0, 0, 0, false};
    // Tile indices with the heads divided out count row blocks, which fit in an int.
    int64_t const target = index_ / schedule_.heads;
    for (; chunk_ < schedule_.batch; chunk_ += WarpInts::lanes) {
      int const chunk = chunk_;
      WarpInts const ends =
          WarpInts::make([&](int lane) { return m_blocks(chunk + lane); }).inclusive_sum();
      int const in_chunk = ends.at(WarpInts::lanes - 1);
      if (target < rows_before_ + in_chunk) {
        // Sequences that end at or before the target, empty ones among them, come before it.
        int const skipped = ends.count_at_most(int(target - rows_before_));
        int const start = skipped == 0 ? 0 : ends.at(skipped - 1);
        set_tile(chunk_ + skipped, rows_before_ + start, ends.at(skipped) - start);
        return;
      }
      rows_before_ += in_chunk;
    }
  }

  FLASH_HD void set_tile(int sequence, int64_t rows_before, int m_blocks) {
    int64_t const in_sequence = index_ - rows_before * schedule_.heads;
    auto const [m_block, head] = tile_at(schedule_.order, in_sequence, m_blocks, schedule_.heads);
    tile_ = {m_block, int(head), sequence, true};
  }

  FLASH_HD int m_blocks(int sequence) const {
    return sequence < schedule_.batch ? num_m_blocks(seqlen_q_(sequence), schedule_.block_m) : 0;
  }

  VarlenSchedule schedule_;
  SeqlenQ seqlen_q_;
  int64_t index_;
  int64_t stride_;
  int chunk_ = 0;            // first of the 32 sequences looked at
  int64_t rows_before_ = 0;  // row blocks of the sequences before them
  WorkTile tile_ = {0, 0, 0, false};
};

}  // namespace flash
