// Types of one sm90 backward kernel for a pair of CTAs, or two: everything that follows from its
// row in the variant table.
#pragma once

#include "params/head_dims.h"
#include "sm90/backward/key_block.h"
#include "sm90/paired_backward/cta_part.h"
#include "sm90/tensor_core.h"

namespace flash::sm90::backward {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, ScoreLevel kScores_>
struct PairedBackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q, K and their gradients
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, O and their gradients
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;  // keys of the pair
  static constexpr ScoreLevel kScores = kScores_;
  static constexpr int kStages = kStages_;  // buffers for dO; for Q see below

  static constexpr int kPair = 2;                // CTAs
  static constexpr int kKeys = kBlockN / kPair;  // of one CTA
  // Two pairs have half of the columns each where one has no registers for all of them.
  static constexpr int kColumnParts = is_wide(kHeadDim, kHeadDimV) ? 2 : 1;
  static constexpr int kCluster = kPair * kColumnParts;
  static constexpr int kColumns = kHeadDim / kColumnParts;  // of Q and K in one CTA
  static constexpr int kColumnsV = kHeadDimV / kColumnParts;
  static constexpr bool kSplitsColumns = kColumnParts > 1;
  static_assert(kKeys == kWarpgroupRows && kBlockM == kWarpgroupRows);

  // One warpgroup loads, one computes the scores and dV, one dK and dQ.
  static constexpr int kRoleWarps = kWarpgroup / 32;
  static constexpr int kThreads = 3 * kWarpgroup;
  static_assert(kWarps_ * 32 == kThreads);
  // The producer warp looks up tiles. It spills where the other warpgroups take all the registers
  // that they can have.
  static constexpr int kLoaderRegisters = kHeadDim <= 192 || kSplitsColumns ? 40 : 24;
  static constexpr int kScoreRegisters = kHeadDim <= 192 ? 232 : 240;
  static constexpr int kGradientRegisters = kSplitsColumns ? 224 : kScoreRegisters;

  // A CTA computes dQ over all the pair's keys, in half of the pair's columns.
  static constexpr int kConsumers = kCluster;
  static constexpr int kAdders = kCluster;  // CTAs that add a tile's dQ
  static constexpr bool kKvPersistent = false, kOrderedDq = false, kOrdersDq = false;
  static constexpr bool kComputesDelta = false;
  static constexpr bool kStreamsTiles = false, kWideKeyRows = false, kWideQueryRows = false;
  static constexpr int kKeyStages = 1;
  static constexpr bool kRowSplit =
      has_row_split(kHeadDim, kHeadDimV, kScores == ScoreLevel::Plain);
  static constexpr bool kHalfFactors = false;
  // A softcap alone and ALiBi alone have loops of their own (rate over plain, 4k causal, d 192,
  // H200: 0.741 and 0.875 in one loop for all score mods, 0.924 and 0.903 in loops of their own).
  static constexpr bool kHasModLoops = kScores == ScoreLevel::Full;
  struct CapLoop {
    static constexpr bool kReadsAhead = false, kScansAhead = false;
  };
  static constexpr int kProbabilityLog2 = 0;
  static constexpr bool kShareRows = false;
  static constexpr int kQueryColumns = kColumns / kPair;
  // K is read by halves of its columns, too.
  static constexpr int kRunK = kRun<kQueryColumns>;

  // Sᵀ and dPᵀ, kKeys by kBlockM rows
  using MmaScores = MmaBothShared<Element, kBlockM, kColumns>;
  // dV: Pᵀ in registers times dO; dK: dSᵀ times Q
  using MmaValues = MmaRegisterA<Element, kColumnsV, kBlockM>;
  using MmaKeys = MmaSharedA<Element, kColumns, kBlockM>;
  using MmaQuery = MmaAcross<Element, kQueryColumns, kKeys>;

  static constexpr int kTileDS = kKeys * kBlockM;  // elements
  static constexpr int kTileQ = kBlockM * kColumns;
  static constexpr int kTileDO = kBlockM * kColumnsV;
  static constexpr int kTileK = kKeys * kColumns;
  static constexpr int kTileHalfK = kKeys * kQueryColumns;
  static constexpr int kTileV = kKeys * kColumnsV;
  // Bytes of a part of S or dP, which the CTA with the same keys and the other columns sends, and
  // of both parts.
  static constexpr int kPartBytes = kKeys * kBlockM * int(sizeof(float));
  static constexpr int kPartsBytes = kSplitsColumns ? 2 * kPartBytes : 0;
  // Buffers for dS, and for the other CTA's dS: two where shared memory has room for them. If there
  // is room for another Q then, Q has it, because Q leaves its buffer half an iteration after dO (d
  // 192, 8k keys, H200: 6%).
  static constexpr int tile_bytes(int q_stages, int score_stages) {
    int const once = kTileK + kTileHalfK + kTileV;
    int const rows = q_stages * kTileQ + kStages * kTileDO;
    return (once + rows + 2 * score_stages * kTileDS) * int(sizeof(Element)) + kPartsBytes;
  }
  static constexpr int kOtherSmem = 3 * 1024;
  static constexpr int kMostTileBytes = kMostSmem - kOtherSmem;
  static constexpr int kScoreStages =
      !kSplitsColumns && tile_bytes(kStages, 2) <= kMostTileBytes ? 2 : 1;
  static constexpr int kQStages =
      tile_bytes(kStages + 1, kScoreStages) <= kMostTileBytes ? kStages + 1 : kStages;
  // Ring positions are kept instead of computed in each iteration: divisions then take less of a
  // third buffer's gain.
  static constexpr bool kAdvances = kQStages > 2;

  // Tiles as rows, for products that reduce over the columns, and the same memory transposed.
  using SmemLayoutQ = SmemTiles<Element, kBlockM, kColumns, kQStages>;
  using SmemLayoutQt = SmemTilesTransposed<Element, kBlockM, kColumns, kQStages>;
  using SmemLayoutDO = SmemTiles<Element, kBlockM, kColumnsV, kStages>;
  using SmemLayoutDOt = SmemTilesTransposed<Element, kBlockM, kColumnsV, kStages>;
  using SmemLayoutK = SmemTiles<Element, kKeys, kColumns, 1, kRunK>;
  using SmemLayoutHalfKt = SmemTilesTransposed<Element, kKeys, kQueryColumns, 1, kRunK>;
  using SmemLayoutV = SmemTiles<Element, kKeys, kColumnsV, 1>;
  // dSᵀ: (keys, rows)
  using SmemLayoutDS = SmemTiles<Element, kKeys, kBlockM, kScoreStages>;
  using SmemLayoutDSt = SmemTilesTransposed<Element, kKeys, kBlockM, kScoreStages>;
};

}  // namespace flash::sm90::backward
