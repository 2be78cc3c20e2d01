// When clusters of thread blocks share pieces, and of how many: sm80/decode/cluster_merge.h.
#pragma once

#include "core/wanted_columns.h"

namespace flash {

// What a cluster's blocks would read.
struct TileShape {
  int rows;        // of a tile
  int64_t units;   // of keys, of the longest sequence that the host knows of
  int64_t pieces;  // that a tile would be cut into without clusters
};

// The last block of a tile merges four rows at a time, one behind the other, where a cluster's have
// some each; with few rows waiting for places for all blocks at once costs more than that. On an
// H200, of the time without: 4 queries of 4 heads 0.97, one 1.03 to 1.08.
constexpr int kRowsWorthClusters = 8;

// A block has two units to read, at least, as long as it takes to start.
constexpr int kLeastUnitsOfBlock = 2;

// 16 are more than every GPU is sure to have, and what Hopper's have.
constexpr int kMostClusterLog2 = 4;

// 0: none.
inline int wanted_cluster_log2(TileShape const& tile) {
  if (tile.rows < kRowsWorthClusters) {
    return 0;
  }
  int64_t const by_units = (tile.units + kLeastUnitsOfBlock - 1) / kLeastUnitsOfBlock;
  int64_t const most = std::min(tile.pieces, by_units);
  int log2 = 0;
  while (log2 < kMostClusterLog2 && int64_t(2) << log2 <= most) {
    ++log2;
  }
  return log2;
}

// Units of a cluster's piece, at least, where a tile has several pieces.
inline int min_units_of_cluster(int log2) {
  constexpr int kOfBlock = 6;
  return kOfBlock << log2;
}

// As without clusters, in columns of as many blocks more. Nobody is kept out to make blocks equal:
// those that are left over search beside the others, not behind them, if the GPU has places.
inline ColumnPlan plan_of_clusters(BatchShape shape, Places gpu, int log2, bool one_length,
                                   int64_t all_row_blocks) {
  shape.tiles <<= log2;
  ColumnPlan plan = one_length ? plan_of_one_length(shape, gpu) : plan_columns(shape, gpu, true);
  int64_t const needed = std::max<int64_t>(plan.columns - shape.row_blocks(), 0);
  int64_t const beside = resident(shape.tiles, gpu) - all_row_blocks;
  plan.extra = static_cast<int>(std::max(std::min<int64_t>(plan.extra, beside), needed));
  plan.blocks_per_sm = 0;
  return plan;
}

}  // namespace flash
