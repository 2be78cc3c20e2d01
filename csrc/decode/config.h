// Types of one decode kernel: everything that follows from its row in the table of variants.
#pragma once

#include "core/merge_rounds.h"
#include "params/scores.h"
#include "sm80/tensor_core.h"

namespace flash::decode {

using namespace sm80;  // its tensor-core code serves every GPU

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, int kCachedBits, ScoreLevel kScores_>
struct DecodeConfig {
  using Element = Element_;  // of Q and O
  // K and V are codes of 8 bits, which become fp16 on their way to the products (decode/codes.h).
  static constexpr bool kCodes = kCachedBits == 8;
  using Cached = std::conditional_t<kCodes, float_e4m3_t, Element>;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kBlockM = kBlockM_;      // rows of pack-GQA
  static constexpr int kBlockN = kBlockN_;      // keys of one warp's step
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kUnit = kBlockN * kWarps;  // keys of a CTA's step
  static constexpr int kKeyAlignment = 1;  // a piece may begin with any key: rows are loaded singly
  static constexpr int kStages = kStages_;
  static constexpr ScoreLevel kScores = kScores_;
  // Where CTAs do little but read (launch/decode_plan.cpp), a cluster of them may have a tile.
  static constexpr bool kHasClusters = kScores == ScoreLevel::Plain && kWarps >= 4;
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  static_assert(kBlockM == 16, "the rows of one instruction");
  static_assert(kBlockN % 16 == 0 && kBlockN <= 32, "a lane looks up one key's page");

  // Elements from row to row of Q in shared memory, so that eight of them lie in different banks.
  static constexpr int kQueryStride = kHeadDim + 8;

  using Operand = std::conditional_t<kCodes, half_t, Element>;
  // Rows of Q are multiplied by factors of their own then, because fp16 has a smaller range.
  static constexpr bool kHasRowFactors = kCodes && !std::is_same_v<Element, half_t>;
  using Grid = WarpGrid<Operand, 1>;  // every warp on its own
};

// Where (row, column) of a tile of keys or values lies in shared memory: a SmemTile, of whose
// elements one holds two codes.
template <class Cached, int kRows, int kColumns>
struct CachedTile {
  static constexpr int kShare = 2 / sizeof(Cached);  // of an element
  SmemTile<kRows, kColumns / kShare> tile;

  __device__ int operator()(int row, int column) const {
    return tile(row, column / kShare) * kShare;
  }
};

// Room for the descales of the same rows, for codes that have some.
template <class Config, bool = Config::kCodes>
struct DescaleStorage {
  float k_descales[Config::kStages][Config::kBlockN];
  float v_descales[Config::kStages][Config::kBlockN];
};

template <class Config>
struct DescaleStorage<Config, false> {};

// Room for one warp's keys and values on their way.
template <class Config>
struct RingStorage : DescaleStorage<Config> {
  // CachedTile<Cached, kBlockN, kColumns>
  template <int kColumns>
  using Tile = array_aligned<typename Config::Cached, Config::kBlockN * kColumns>;
  alignas(128) Tile<Config::kHeadDim> k[Config::kStages];
  alignas(128) Tile<Config::kHeadDimV> v[Config::kStages];
};

// Shared memory that a CTA no longer uses when it merges pieces: the ring.
template <class Config>
constexpr int kFreeBytes = sizeof(RingStorage<Config>) * Config::kWarps;

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

// The threads of a CTA that merges rows.
template <class Config>
struct MergingThreads {
  static constexpr int kColumns = 4;                           // of a thread: 16 bytes
  static constexpr int kLanes = Config::kHeadDimV / kColumns;  // threads of a row
  static constexpr int kRows = Config::kThreads / kLanes;      // rows at a time
  static_assert(kRows > 0);
};

// For a CTA that merges pieces: their LSE, (member, row), and the parts of their rows that its
// threads have loaded.
template <class Config>
struct PieceMergeStorage : MergingThreads<Config> {
  // Members that the queue holds
  static constexpr int kQueue = (kFreeBytes<Config> - int(kMergedRows * sizeof(float))) /
                                int(Config::kThreads * sizeof(float4));
  alignas(16) float4 queue[kQueue][Config::kThreads];
  float lse[kMergedRows];
};

}  // namespace flash::decode
