// Types of one kernel whose warps share their keys: everything that follows from its row in the
// table of variants.
#pragma once

#include "decode/config.h"

namespace flash::wide {

using namespace decode;  // whose pieces, outputs and merging these kernels share

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, ScoreLevel kScores_, bool kLatent_ = false>
struct WideConfig {
  using Element = Element_;
  using Cached = Element;
  static constexpr bool kLatent = kLatent_;     // a key is its value, and a rotated part
  static constexpr int kHeadDim = kHeadDim_;    // of q and k; latent: the rotated part
  static constexpr int kHeadDimV = kHeadDimV_;  // of qv, v and O
  // A row of a step's tile: the key's columns, then the value's; latent: the value's, then the
  // rotated ones. Q has those of the scores. kFirstColumns: of the tensor that comes first
  static constexpr int kFirstColumns = kLatent ? kHeadDimV : kHeadDim;
  static constexpr int kColumns = kHeadDimV + kHeadDim;
  static constexpr int kScoreColumns = kLatent ? kColumns : kHeadDim;
  static constexpr int kValueBegin = kLatent ? 0 : kHeadDim;  // the value's first column
  static constexpr int kBlockM = kBlockM_;                    // rows of pack-GQA
  static constexpr int kBlockN = kBlockN_;  // keys of a step, which all warps take together
  static constexpr int kUnit = kBlockN;
  static constexpr int kKeyAlignment = 1;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kStages_;
  static constexpr ScoreLevel kScores = kScores_;

  // Q·Kᵀ: a warp has 16 of a step's keys, and in every run of 64 columns 16; the sums of the four
  // warps that share its keys are added in shared memory.
  static constexpr int kRuns = kScoreColumns / 64;
  static constexpr int kDepthWarps = 4;
  static constexpr int kKeyWarps = kWarps / kDepthWarps;
  static constexpr int kWarpColumns = kHeadDimV / kWarps;  // P·V: of a warp
  static_assert(kFirstColumns % 64 == 0 && kColumns % 64 == 0 && kWarpColumns % 64 == 0,
                "whole runs");
  static_assert(kBlockM == 16, "the rows of one instruction");
  static_assert(kBlockN == 16 * kKeyWarps && kBlockN <= 32, "a step's keys are the bits of a word");

  // Elements from row to row of Q in shared memory, so that eight of them lie in different banks.
  static constexpr int kQueryStride = kScoreColumns + 8;
  // Floats from row to row of partial scores: the four rows that half a warp accesses at a time
  // then lie in different banks.
  static constexpr int kScoreStride = kBlockN + 8;
  static constexpr int kOutStride = kHeadDimV + 8;  // the same of O

  using Grid = WarpGrid<Element, 1>;  // every warp on its own
  using Tile = SmemTile<kBlockN, kColumns>;
};

template <class Config>
struct WideStorage {
  union {  // the results come when all keys have been read
    alignas(128)
        array_aligned<typename Config::Element,
                      Config::kBlockN * Config::kColumns> keys[Config::kStages];  // Config::Tile
    alignas(16) float out[Config::kBlockM][Config::kOutStride];
    PieceMergeStorage<Config> pieces;
  };
  union {  // Q, until the warps have it in registers
    alignas(16) array_aligned<typename Config::Element, Config::kBlockM * Config::kQueryStride> q;
    alignas(16) float scores[Config::kDepthWarps][Config::kBlockM][Config::kScoreStride];
  };
  // Which keys of a step exist: bits of the keys that a warp loads.
  unsigned exist[Config::kStages][Config::kWarps];
  alignas(16) char work[sizeof(DecodeWork<Config>)];  // read again at each use, to save registers
};

template <class Config>
constexpr int kSmemBytes = sizeof(WideStorage<Config>);

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps,
          int kStages, ScoreLevel kScores>
using LatentConfig =
    WideConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, kStages, kScores, true>;

}  // namespace flash::wide

namespace flash::decode {

// Shared memory that a CTA no longer uses when it merges pieces: the steps' keys.
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps,
          int kStages, ScoreLevel kScores, bool kLatent>
constexpr int kFreeBytes<wide::WideConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps,
                                          kStages, kScores, kLatent>> =
    kStages * kBlockN * (kHeadDim + kHeadDimV) * sizeof(Element);

}  // namespace flash::decode
