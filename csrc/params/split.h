#pragma once

#include <cstdint>

namespace flash {

// How the keys of a batch are cut into pieces that thread blocks work on side by side: see
// core/split_schedule.h. Fixed by the host, which does not know the lengths.
struct SplitSchedule {
  int batch;
  int tiles;       // of a sequence: KV heads x row blocks; all are cut alike
  int unit;        // keys; pieces are whole units long
  int min_units;   // of a piece, so that what it costs to merge it is little
  int max_splits;  // pieces of a tile; 1: nothing is cut
  int wanted;      // pieces in all: enough to fill the GPU
};

// The pieces of one sequence, as the kernel that merges them finds them.
struct SequenceSplits {
  int first;  // column of its first piece
  int count;
};

}  // namespace flash
