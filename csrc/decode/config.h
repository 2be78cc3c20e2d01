// Types of one decode kernel: everything that follows from its row in the table of variants.
#pragma once

#include "params/scores.h"
#include "sm80/tensor_core.h"

namespace flash::decode {

using namespace sm80;  // its tensor-core code serves every GPU

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, ScoreLevel kScores_>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kBlockM = kBlockM_;      // rows of pack-GQA
  static constexpr int kBlockN = kBlockN_;      // keys of one warp's step
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kUnit = kBlockN * kWarps;  // keys of a CTA's step
  static constexpr int kStages = kStages_;
  static constexpr ScoreLevel kScores = kScores_;
  // Where CTAs do little but read (launch/attention_plan.cpp), a cluster of them may have a tile.
  static constexpr bool kHasClusters = kScores == ScoreLevel::Plain && kWarps >= 4;
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  static_assert(kBlockM == 16, "the rows of one instruction");
  static_assert(kBlockN % 16 == 0 && kBlockN <= 32, "a lane looks up one key's page");

  // Elements from row to row of Q in shared memory, so that eight of them lie in different banks.
  static constexpr int kQueryStride = kHeadDim + 8;

  using Grid = WarpGrid<Element, 1>;  // every warp on its own
};

// Room for one warp's keys and values on their way.
template <class Config>
struct RingStorage {
  using Element = typename Config::Element;
  // SmemTile<kBlockN, kColumns>
  template <int kColumns>
  using Tile = array_aligned<Element, Config::kBlockN * kColumns>;
  alignas(128) Tile<Config::kHeadDim> k[Config::kStages];
  alignas(128) Tile<Config::kHeadDimV> v[Config::kStages];
};

// The results that the warps exchange in the end.
template <class Config>
struct MergeStorage {
  // Eight words longer than the row: the eight rows and four columns that a warp's lanes store to
  // then lie in different banks.
  static constexpr int kRowStride = Config::kHeadDimV + 8;
  float max[Config::kWarps][Config::kBlockM];
  float sum[Config::kWarps][Config::kBlockM];
  alignas(16) float out[Config::kWarps][Config::kBlockM][kRowStride];
};

// Rows that one CTA merges in a round. At d 128 these are 160 KiB, which it reads in 1.5 µs, as
// long as a round itself takes. They are 20 pieces of 16 rows, so that two rounds merge a tile with
// a piece for every resident CTA of an H200.
constexpr int kMergedRows = 320;

// For a CTA that merges pieces: their LSE, (member, row), and the parts of their rows that its
// threads have loaded.
template <class Config>
struct PieceMergeStorage {
  static constexpr int kColumns = 4;                           // of a thread: 16 bytes
  static constexpr int kLanes = Config::kHeadDimV / kColumns;  // threads of a row
  static constexpr int kRows = Config::kThreads / kLanes;      // rows at a time
  static_assert(kRows > 0);
  // Members that the queue holds, in the memory that the ring no longer uses
  static constexpr int kQueue =
      (sizeof(RingStorage<Config>) * Config::kWarps - kMergedRows * sizeof(float)) /
      (Config::kThreads * sizeof(float4));
  alignas(16) float4 queue[kQueue][Config::kThreads];
  float lse[kMergedRows];
};

}  // namespace flash::decode
