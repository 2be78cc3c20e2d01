#pragma once

#include <cstdint>

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

// The widest group, up to `group`, that leaves no small rest: a rest of a few columns would run at
// the end, with most of the GPU idle.
FLASH_HD int even_group(int group, int64_t num_columns) {
  int64_t const groups = (num_columns + group - 1) / group;
  return groups > 1 ? int((num_columns + groups - 1) / groups) : group;
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

// Index: what tiles are counted in (see tile_at).
template <class Index = int64_t>
class DenseScheduler {
 public:
  FLASH_HD DenseScheduler(DenseSchedule const& schedule, int64_t block, int64_t num_blocks)
      : schedule_(schedule), index_(Index(block)), stride_(Index(num_blocks)) {}

  FLASH_HD bool valid() const { return index_ < schedule_.num_tiles(); }

  FLASH_HD void next() { index_ += stride_; }

  FLASH_HD WorkTile coord() const {
    if (!valid()) return {0, 0, 0, false};
    auto const [m_block, column] =
        tile_at<Index>(schedule_.order, index_, schedule_.m_blocks, Index(schedule_.columns()));
    Index const batch = column / schedule_.heads;
    return {m_block, int(column - batch * schedule_.heads), int(batch), true};
  }

 private:
  DenseSchedule schedule_;
  Index index_;
  Index stride_;
};

// ---- lengths are known only on the device -----------------------------------------------------

// Fixed by the host, which knows the total number of rows and must not wait for the lengths.
//
// Sequence b, which starts at row start(b) of the packed q, owns the row blocks from
// first_block(b) = start(b) / block_m + b on. That is enough of them: with start(b) = x * block_m +
// r, first_block(b + 1) - first_block(b) = (r + length) / block_m + 1 >= ceil(length / block_m). So
// no prefix sum over lengths is needed, and a tile finds its sequence by bisection. The blocks that
// are too many, at most one or two a sequence, are invalid tiles.
struct VarlenSchedule {
  int64_t total_q;  // rows of all sequences together
  int block_m;
  int heads;  // query heads
  int batch;  // sequences
  TileOrder order;

  template <class Index>
  FLASH_HD Index first_block(int sequence, Index start) const {
    return start / block_m + sequence;
  }
  FLASH_HD int64_t num_tiles() const { return first_block(batch, total_q) * heads; }
};

// The last of [0, count) that is not behind; those that are come after those that are not, and 0 is
// not.
struct Bisection {
  template <class IsBehind>
  FLASH_HD int operator()(int count, IsBehind is_behind) const {
    int low = 0, high = count;  // low: not behind, high: behind
    while (high - low > 1) {
      int const middle = low + (high - low) / 2;
      (is_behind(middle) ? high : low) = middle;
    }
    return low;
  }
};

// Sequences run in order; inside one, all heads and row blocks run in the dense order.
// Start: callable, sequence in [0, batch] -> its first row; total_q for `batch`. Its type is what
// tiles are counted in.
// Search: finds a tile's sequence, like Bisection.
template <class Start, class Search = Bisection>
class VarlenScheduler {
  using Index = std::invoke_result_t<Start, int>;

 public:
  FLASH_HD VarlenScheduler(VarlenSchedule const& schedule, Start start, int64_t block,
                           int64_t num_blocks, Search search = {})
      : schedule_(schedule),
        start_(start),
        index_(Index(block)),
        stride_(Index(num_blocks)),
        search_(search) {}

  FLASH_HD bool valid() const { return index_ < schedule_.num_tiles(); }

  FLASH_HD void next() { index_ += stride_; }

  FLASH_HD WorkTile coord() const {
    if (!valid()) return {0, 0, 0, false};
    int const sequence = find(index_ / schedule_.heads);
    Index const start = start_(sequence), end = start_(sequence + 1);
    Index const first = schedule_.first_block(sequence, start);
    int const blocks = int(schedule_.first_block(sequence + 1, end) - first);
    auto const [m_block, head] =
        tile_at<Index>(schedule_.order, index_ - first * schedule_.heads, blocks, schedule_.heads);
    return {m_block, int(head), sequence, Index(m_block) * schedule_.block_m < end - start};
  }

 private:
  // The last sequence whose first row block is not behind `row_block`.
  FLASH_HD int find(Index row_block) const {
    return search_(schedule_.batch, [&](int sequence) {
      return schedule_.first_block(sequence, start_(sequence)) > row_block;
    });
  }

  VarlenSchedule schedule_;
  Start start_;
  Index index_;
  Index stride_;
  Search search_;
};

}  // namespace flash
