// The speed of a GPU, in numbers that were measured on it (`make tune`, csrc/plan/machines), and
// the kernel that serves a call there. Predictions use only these and the shape of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "params/forward_tile.h"

namespace flash::plan {

// A kernel's time on one SM, in µs.
struct KernelTimes {
  float fixed;  // of a tile, whatever its steps: its beginning and its end
  float step;   // a tile's rows against its keys, once
};

// The kernels of a row of the table. A backward has one for each schedule (plan/plan.h); a forward,
// one for each tile (params/forward_tile.h); decoding, with one CTA an SM, has [0] for 16 bits and
// [1] for codes.
struct RowTimes {
  int head_dim;
  int head_dim_v;
  KernelTimes kernels[4];
};

struct Machine {
  int sm;  // compute capability, 90
  int sm_count;
  int64_t l2_bytes;
  float memory;             // bytes that come from memory in a µs
  float reads = 0;          // the same where nothing is written
  float sm_reads = 0;       // bytes that one SM takes in a µs, wherever they come from
  float code_reads = 0;     // the same of codes, which it converts
  float launch;             // µs from the end of a launch to the beginning of the next
  float l2_factor;          // L2's bytes times this are as many as repeated accesses find again
  float search = 0;         // µs that a CTA searches its keys among 32 sequences' lengths
  float next_block = 0;     // µs that an SM takes from a CTA's end to another's work
  float cluster_block = 0;  // µs that each CTA of a cluster adds: the others wait for it
  float merge_round = 0;    // µs of a round of merging pieces
  float merge_row = 0;      // and of each row of a thread in it, of up to 16 pieces
  float merge_wait = 0;     // µs that merging a forward's splits waits for a row's numbers from L2
  float mma_flops;          // of one SM in a µs, by mma.sync: what sm80's kernels reach
  std::span<RowTimes const> backward = {};       // of Hopper's kernels
  std::span<RowTimes const> forward = {};        // of Hopper's plain kernels
  std::span<RowTimes const> forward_codes = {};  // the same of codes
  std::span<RowTimes const> forward_fp8 = {};    // of those whose products are of codes
  std::span<RowTimes const> decode = {};
};

// A row of the table (csrc/variants.py) on a GPU.
struct Kernel {
  int sm;        // family: 80, 90
  int head_dim;  // that it computes with
  int head_dim_v;
  int block_m;   // rows of a step, or of a decode tile: queries times the heads of a KV head
  int block_n;   // keys of a step; of decoding, of a CTA: its unit
  bool plain;    // no score mods
  int resident;  // CTAs, or clusters that share a tile, that the GPU runs at a time (resident.h)
  int second_block_n = 0;     // of a forward; 0: there is no second tile
  int rows_at_once = 0;       // of decoding: rows of a tile that a CTA merges side by side
  bool clusters = false;      // of decoding: clusters of CTAs may share tiles
  bool codes = false;         // K and V are codes of 8 bits
  bool merges_after = false;  // of decoding: pieces are merged by a launch, or sent in a cluster
  int cluster = 1;            // CTAs that share a tile
  bool query_codes = false;   // of a forward: Q too; such rows have neither pack-GQA nor KV splits

  int block_n_of(ForwardTile tile) const {
    return tile == ForwardTile::Second ? second_block_n : block_n;
  }
};

}  // namespace flash::plan
