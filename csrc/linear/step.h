// One token of each sequence against its state in memory: what the kernel is given, and how a call
// is divided.
#pragma once

#include "launch/variant.h"
#include "linear/params.h"
#include "params/fast_div.h"

namespace flash::linear {

// Log decays [b, h, k]; a stride is 0 where one number serves a whole dimension. ptr null: none.
struct StepGate {
  void const* ptr;
  int64_t row_stride;
  int64_t head_stride;
  int64_t k_stride;
  bool fp32;  // else q's dtype
};

struct StepParams {
  TensorView<void const> q;  // [b, hk, k]
  TensorView<void const> k;
  TensorView<void const> v;  // [b, h, v]
  TensorView<void> o;
  StepGate gate;
  StateView<float> state;  // [slots, h, k, v], read and written
  int const* slots;        // [b]; null: the state of row b is b
  int state_count;
  int rows;  // b
  int heads;
  int group;  // heads that share one of q and k
  int k_dim;
  int v_dim;
  float scale;
  bool along_k;  // neighbours in memory are so in K, else in V
  bool aligned;  // those rows of a state are whole runs of 16 bytes, and begin at such
};

constexpr int kStepLoads = 8;       // that a thread has under way together
constexpr int kMostStepGroups = 8;  // of threads, that share the rows of K of a state
constexpr int kMostStepThreads = 32 * kMostStepGroups;

// A tile has some of V's columns of one state, with all rows of K, and is the work of some groups
// of threads, which leave each other partial sums over K. Which rows of K a thread adds up depends
// on K and the layout alone: so no bit of a row depends on the other rows of the batch.
struct StepGrid {
  FastDiv tiles;     // of V, in a state
  FastDiv heads;     // of a row
  FastDiv group;     // heads that share one of q and k
  int columns_log2;  // of a tile
  int lanes_log2;    // that share a row of the state along K
  int groups_log2;   // of a tile
  int all_tiles;
  int tiles_of_cta;

  FLASH_HD int groups() const { return 1 << groups_log2; }
  FLASH_HD int columns() const { return 1 << columns_log2; }
  FLASH_HD int64_t ctas() const { return (int64_t(all_tiles) + tiles_of_cta - 1) / tiles_of_cta; }
};

// The least power of two that is no less, as its logarithm.
FLASH_HD int log2_above(int x) {
  int log = 0;
  while ((1 << log) < x) {
    ++log;
  }
  return log;
}

// dtype: of q, "bf16", "fp16" or "fp32".
void launch_step(StepParams const& p, char const* dtype, LaunchContext const& launch);

}  // namespace flash::linear
