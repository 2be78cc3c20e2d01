#pragma once

#include "params/fast_div.h"

namespace flash {

// How the keys of a batch are cut into pieces that thread blocks work on side by side: see
// core/split_schedule.h. Fixed by the host, which does not know the lengths.
struct SplitSchedule {
  int batch;
  FastDiv tiles;   // of a column: KV heads x row blocks, or KV heads; all are cut alike
  bool equal;      // no tensor says how long sequences are: all are as long as the first
  int min_units;   // of a piece, so that what it costs to merge it is little
  int max_splits;  // pieces of a tile; 1: nothing is cut
  int columns;     // pieces of all sequences, for each tile, as many as are wanted
  int extra;       // columns beside one for each row block, at most: the grid has no more
  // Sequences of a packed batch differ in row blocks, which have columns of their own, and so have
  // those of the rows that belong to no sequence.
  bool packed;
  int all_row_blocks;    // with columns of their own, at most: `batch` where they are in `tiles`
  int cluster_log2 = 0;  // of the thread blocks that share a piece
};

}  // namespace flash
