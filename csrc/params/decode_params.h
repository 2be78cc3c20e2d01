#pragma once

#include "params/append_params.h"
#include "params/fwd_params.h"

namespace flash {

// How the keys of a batch are cut into pieces that CTAs work on at the same time: see
// core/piece_schedule.h. The host fixes it without knowing the lengths. A slice is one piece of
// each tile of a sequence, or of each tile of one row block of a varlen sequence.
struct PieceSchedule {
  int batch;
  FastDiv tiles;   // tiles of a slice: KV heads x row blocks, or KV heads; all are cut alike
  bool equal;      // no tensor says how long sequences are: all are as long as the first
  int min_units;   // the fewest units of a piece, so that merging it costs little
  int max_pieces;  // pieces of a tile; 1: nothing is cut
  int slices;      // the slices that are wanted, of all sequences
  int extra;       // most slices beside one for each row block: the grid has no more
  // Varlen sequences differ in their row blocks, each of which has slices of its own. So do the row
  // blocks of rows that belong to no sequence.
  bool varlen;
  int all_row_blocks;    // most row blocks with slices of their own; `batch` if they are in `tiles`
  int cluster_log2 = 0;  // log2 of the CTAs that share a whole tile
};

// The most CTAs of an SM that the decode kernel's registers allow. Shared memory lets
// three fit one of Hopper's.
constexpr int kMostDecodeBlocks = 3;

// One call with few query rows against a cache. The workspace is there if schedule cuts tiles.
struct DecodeParams {
  FwdParams fwd;
  FastDiv group;     // query heads of a KV head
  FastDiv heads_kv;  // fwd.heads_kv
  PieceSchedule schedule;
  float* partial_out;  // [pieces, block_m, dv], each piece's rows normalised
  float* partial_lse;  // [pieces, block_m]
  uint32_t* counters;  // [pieces], count pieces that are done: zero before and after a launch
  bool beside;         // runs beside the launch before it, on which it does not depend
  NewRows rows;        // rows that the kernel writes; none: k_cache is null
};

}  // namespace flash
