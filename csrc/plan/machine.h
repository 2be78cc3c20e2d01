// The speed of a GPU, in numbers that were measured on it (`make tune`, csrc/plan/machines).
// Predictions use only these and the shape of a call.
#pragma once

#include <cstdint>
#include <span>

namespace flash::plan {

// A kernel's time on one multiprocessor, in µs.
struct KernelTimes {
  float begin;  // the beginning and end of a tile, beside its steps
  float step;   // a tile's rows against its keys, once
};

// The backward kernels of a head dim, in each schedule (plan/backward.h).
struct BackwardTimes {
  int head_dim;
  int head_dim_v;
  KernelTimes tiles;
  KernelTimes kv_persistent;
  KernelTimes ordered_dq;
};

// The kernels of a forward row (plan/forward.h).
struct ForwardTimes {
  int head_dim;
  int head_dim_v;
  KernelTimes first;   // the row's tile
  KernelTimes second;  // the tile with second_block_n keys
  KernelTimes packed;  // pack-GQA
  KernelTimes split;   // pack-GQA of splits
};

// The kernels of a decode row (plan/decode.h), with a CTA alone on its multiprocessor.
struct DecodeTimes {
  int head_dim;
  int head_dim_v;
  KernelTimes pieces;
};

struct Machine {
  int sm;  // compute capability, 90
  int sm_count;
  int64_t l2_bytes;
  int smem_per_block;
  float memory;        // bytes that come from memory in a µs
  float reads = 0;     // the same where nothing is written
  float sm_reads = 0;  // bytes that one multiprocessor takes in a µs, wherever they come from
  float l2_gain;       // how much faster bytes come from L2
  float launch;        // µs from the end of a launch to the beginning of the next
  float l2_share;      // the share of L2's bytes that can be counted on to be there again
  float mma_flops;     // of one multiprocessor in a µs, by mma.sync: what the sm80 kernels reach
  std::span<BackwardTimes const> backward = {};  // of Hopper's kernels
  std::span<ForwardTimes const> forward = {};    // of Hopper's plain kernels
  std::span<DecodeTimes const> decode = {};
};

}  // namespace flash::plan
