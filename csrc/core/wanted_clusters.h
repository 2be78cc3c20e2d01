// When a cluster of thread blocks has a tile, and of how many: sm80/decode/cluster_merge.h.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash {

// A call whose tiles might be clusters'.
struct ClusterWork {
  int rows;        // of a tile
  int64_t units;   // of a tile's keys, as far as the host knows
  int64_t pieces;  // that a tile would be cut into
  int64_t tiles;
};

// The last block of a tile merges four rows at a time, one behind the other, where a cluster's have
// some each. With fewer rows than this that costs less than waiting for places for all blocks at
// once: on an H200 1 x 1k keys, one query of 4 heads, took 18% more.
constexpr int kRowsWorthClusters = 8;

// A block has two units to read, at least, as long as it takes to start; and so few, at most, that
// it does not matter if there would be more pieces than a cluster has blocks.
constexpr int kLeastUnitsOfBlock = 2, kFewUnitsOfBlock = 4;
// So many that what the end of a tile costs is nothing, and that blocks of a cluster, of which one
// waits for the last, lose more. On an H200, 4 queries of 4 heads: of 32k keys, 32 units for each
// block, clusters take 5% less, of 144k 10% more.
constexpr int kMostUnitsOfBlock = 64;

// 16 are more than every GPU is sure to have, and what Hopper's have.
constexpr int kMostClusterLog2 = 4;

// 0: none. No more blocks than multiprocessors: with two of them on one, where clusters' blocks
// wait for each other, 32 x 8k keys, 16 heads on one, took 4 to 6% more, random lengths 13%.
inline int wanted_cluster_log2(ClusterWork const& work, int sm_count) {
  if (work.rows < kRowsWorthClusters) {
    return 0;
  }
  int64_t const by_units = (work.units + kLeastUnitsOfBlock - 1) / kLeastUnitsOfBlock;
  int64_t const most = std::min({work.pieces, by_units, sm_count / work.tiles});
  int log2 = 0;
  while (log2 < kMostClusterLog2 && int64_t(2) << log2 <= most) {
    ++log2;
  }
  bool const has_few = work.units <= int64_t(kFewUnitsOfBlock) << log2;
  bool const are_as_many = 8 * (int64_t(1) << log2) >= 7 * work.pieces;
  bool const has_too_many = work.units > int64_t(kMostUnitsOfBlock) << log2;
  return (has_few || are_as_many) && !has_too_many ? log2 : 0;
}

}  // namespace flash
