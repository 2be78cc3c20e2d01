#pragma once

#include "params/fast_div.h"

namespace flash {

// How the keys of a batch are cut into pieces that CTAs work on at the same time: see
// core/split_schedule.h. The host fixes it, and does not know the lengths. A slice is a piece of each
// tile of a sequence, or of a row block of a varlen sequence.
struct SplitSchedule {
  int batch;
  FastDiv tiles;   // of a slice: KV heads x row blocks, or KV heads; all are cut alike
  bool equal;      // no tensor says how long sequences are: all are as long as the first
  int min_units;   // of a piece, so that what it costs to merge it is little
  int max_splits;  // pieces of a tile; 1: nothing is cut
  int slices;      // of all sequences, as many as are wanted
  int extra;       // slices beside one for each row block, at most: the grid has no more
  // Varlen sequences differ in row blocks, which have slices of their own, and so have those of the
  // rows that belong to no sequence.
  bool packed;
  int all_row_blocks;    // with slices of their own, at most: `batch` where they are in `tiles`
  int cluster_log2 = 0;  // of the CTAs that share a piece
};

}  // namespace flash
