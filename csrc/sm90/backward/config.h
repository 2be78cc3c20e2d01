// Types of one sm90 backward kernel: everything that follows from its row in the variant table.
#pragma once

#include "params/bwd_params.h"
#include "sm90/tensor_core.h"

namespace flash::sm90::backward {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, ScoreLevel kScores_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q, K and their gradients
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, O and their gradients
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKeys = kBlockN;  // of a CTA
  static constexpr ScoreLevel kScores = kScores_;
  static constexpr int kStages = kStages_;  // buffers for Q
  static_assert(kStages >= 2);  // the next row block's scores need its Q beside this one's
  static constexpr int kDoutStages = kStages;  // buffers for dO
  static constexpr int kScoreStages = 2;       // buffers for dS

  // The first warpgroup has the producer warp; each of the others, a consumer, computes 64 keys.
  static constexpr int kConsumers = kBlockN / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr int kAdders = 1;  // CTAs that add a tile's dQ
  static constexpr bool kKvPersistent = false, kOrderedDq = false, kComputesDelta = false;
  static constexpr bool kOrdersDq = false;  // the first and the last KV block differ (dq_action.h)
  static constexpr bool kStreamsTiles = false;
  static constexpr int kKeyStages = 1;  // buffers for K
  // Lanes store 16 bytes each, of dK and dV, or of dQ.
  static constexpr bool kWideKeyRows = false, kWideQueryRows = false;
  static constexpr bool kRowSplit =
      has_row_split(kHeadDim, kHeadDimV, kScores == ScoreLevel::Plain);
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static_assert(kWarps_ * 32 == kThreads && kBlockN % kWarpgroupRows == 0);
  static_assert(kConsumers == 2);
  // setmaxnreg: consumers get the registers that the producer's warpgroup gives up.
  static constexpr int kLoaderRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // Sᵀ and dPᵀ, 64 keys of a warpgroup by kBlockM rows
  using MmaScores = MmaBothShared<Element, kBlockM, kHeadDim>;
  // dK and dV: dSᵀ and Pᵀ in registers, times Q and dO
  using MmaKeys = MmaRegisterA<Element, kHeadDim, kBlockM>;
  using MmaValues = MmaRegisterA<Element, kHeadDimV, kBlockM>;

  // dQ: each warpgroup computes 64 rows, or half of the columns of the same 64 rows. If half of the
  // columns are not whole runs, both compute the run in the middle, and each adds its half.
  static constexpr bool kShareRows = kBlockM == kConsumers * kWarpgroupRows;
  static_assert(kShareRows || kBlockM == kWarpgroupRows);
  static constexpr int kQueryColumns =
      kShareRows ? kHeadDim : ceil_div(kHeadDim / kConsumers, kRun<kHeadDim>) * kRun<kHeadDim>;
  using MmaQuery = MmaAcross<Element, kQueryColumns, kBlockN>;
  static constexpr int kRunK = kRun<kHeadDim>;

  // Details of an iteration that decide how good ptxas's code is, each as measured for the head dim
  // (docs/lab/sm90_backward_step.md).
  static constexpr bool kPlain = kScores == ScoreLevel::Plain;
  // The scores of the next row block are started before this one's dQ is added, not after it.
  static constexpr bool kScoresFirst = kPlain || kHeadDim <= 96;
  // The loop counts a tile's iterations, instead of reading from each whether another follows.
  static constexpr bool kCountsIterations = kPlain;
  // All of dP's product is started before the first exponential.
  static constexpr bool kStartsFirst = kPlain && kHeadDim == 64;
  // D, and where dQ goes, are read before the wait for the product after which they are used.
  static constexpr bool kReadsAhead = kPlain && kHeadDim >= 96;
  // Calls that add to dQ's sums have a loop of their own.
  static constexpr bool kOwnLoopToAdd = kReadsAhead;
  // LSE of the next row block is read before its scores are started.
  static constexpr bool kReadsLseAhead = kPlain && kHeadDim == 128;

  // With score mods, factors have 16 bits, each mod has a loop of its own, and one body serves
  // masked and whole row blocks (half_factors_tile.h).
  static constexpr bool kHalfFactors = !kPlain && kHeadDim == 64;
  // Elsewhere a softcap alone has a loop of its own where that is faster, with one body as well
  // (one_mod_tile.h).
  static constexpr bool kHasCapLoop = !kPlain && kHeadDim == 128;
  // Details of the loop for a softcap alone, where there is one. Rate over plain, 4k causal, H200:
  // d 64 0.740 with the other mods' details, 0.749 with these; d 128 0.730 in one loop for all
  // mods, 0.820 in a loop of its own.
  struct CapLoop {
    static constexpr bool kCountsIterations = kHeadDim == 64;
    static constexpr bool kReadsAhead = true;
    // The next row block's scores are started before this one's dK; the largest of them, which
    // decides how tanh is computed, is searched while dK's product runs. Only D is still read ahead
    // then.
    static constexpr bool kScansAhead = kHeadDim == 128;
  };
  // The unit of probabilities in modified tiles is 2 to the power of minus this; LSE is less by it.
  // Probabilities are at most 1, or little more where LSE is large and rounded: in this unit, fp16
  // has 11 bits for their products with derivatives, from 2^-26 to 16.
  static constexpr int kProbabilityLog2 = kHalfFactors ? 12 : 0;
  static constexpr float kProbabilityUnit = 1 << kProbabilityLog2;

  // Tiles as rows, for products that reduce over the columns, and the same memory transposed.
  using SmemLayoutQ = SmemTiles<Element, kBlockM, kHeadDim, kStages>;
  using SmemLayoutQt = SmemTilesTransposed<Element, kBlockM, kHeadDim, kStages>;
  template <int kBuffers>
  using SmemLayoutDO = SmemTiles<Element, kBlockM, kHeadDimV, kBuffers>;
  template <int kBuffers>
  using SmemLayoutDOt = SmemTilesTransposed<Element, kBlockM, kHeadDimV, kBuffers>;
  template <int kBuffers>
  using SmemLayoutK = SmemTiles<Element, kBlockN, kHeadDim, kBuffers>;
  template <int kBuffers>
  using SmemLayoutKt = SmemTilesTransposed<Element, kBlockN, kHeadDim, kBuffers>;
  using SmemLayoutV = SmemTiles<Element, kBlockN, kHeadDimV, 1>;
  // dSᵀ: (keys, rows)
  using SmemLayoutDS = SmemTiles<Element, kBlockN, kBlockM, kScoreStages>;
  using SmemLayoutDSt = SmemTilesTransposed<Element, kBlockN, kBlockM, kScoreStages>;

  static constexpr int kTileQ = kBlockM * kHeadDim;  // elements
  static constexpr int kTileDO = kBlockM * kHeadDimV;
  static constexpr int kTileK = kBlockN * kHeadDim;
  static constexpr int kTileV = kBlockN * kHeadDimV;
  static constexpr int kTileDS = kBlockN * kBlockM;
};

// The config of a KV-persistent kernel, of CTAs or of clusters. As a flag of the call, KV
// persistence took 2 to 12% of other calls' time (H200, d 96 most): ptxas makes other code of the
// whole loop.
template <class Config>
struct KvPersistentConfig : Config {
  static constexpr bool kKvPersistent = true, kOrdersDq = true;
  static constexpr bool kRowSplit = false;

  // Some details do not suit d 128 here: 512 keys, causal, 0.98 of FA3 with them, 1.09 without.
  static constexpr bool kSuit = Config::kHeadDim <= 96;
  static constexpr bool kScoresFirst = Config::kScoresFirst && kSuit;
  static constexpr bool kCountsIterations = Config::kCountsIterations && kSuit;
  static constexpr bool kReadsAhead = Config::kReadsAhead && kSuit;
  static constexpr bool kReadsLseAhead = Config::kReadsLseAhead && kSuit;
  static constexpr bool kOwnLoopToAdd = false;
};

// The config of a kernel with ordered dQ accumulation, of CTAs or of clusters.
template <class Config>
struct OrderedDqConfig : Config {
  static constexpr bool kOrderedDq = true, kOrdersDq = true;
  static constexpr bool kRowSplit = false;

  // Tiles are one stream of iterations: a tile's last iteration starts the next tile's first
  // scores, and the next tile's first iteration adds this one's last dQ, so that no consumer is
  // idle after a product between tiles. K of both tiles is needed then, so it has two buffers.
  // Clusters have no room for them.
  static constexpr bool kStreamsTiles = Config::kAdders == 1;
  static constexpr int kKeyStages = kStreamsTiles ? 2 : 1;

  // The delta warp computes D ahead of the tiles: rows of dO and O that it loads at a time, and its
  // buffers. At d 128 these take the room of a third buffer for dO, which is worth half a percent.
  static constexpr bool kComputesDelta = ordered_dq_computes_delta(Config::kHeadDim);
  static constexpr bool kDeltaOfDout = Config::kHeadDim == 128;
  static constexpr int kDoutStages = kDeltaOfDout ? 2 : Config::kStages;
  static constexpr bool kFewDeltaRows = kDeltaOfDout || Config::kHeadDimV > 128;
  static constexpr int kDeltaRows = kFewDeltaRows ? 8 : Config::kHeadDim == 96 ? 32 : 16;
  static constexpr int kDeltaStages = Config::kAdders > 1 ? 2 : 3;
  // Enough registers for the delta warp, where consumers do not miss them.
  static constexpr bool kLoadsWide = Config::kHeadDim == 96;
  static constexpr int kLoaderRegisters = kLoadsWide ? 40 : Config::kLoaderRegisters;
  static constexpr int kConsumerRegisters = kLoadsWide ? 232 : Config::kConsumerRegisters;

  // As measured here (docs/lab/sm90_backward_ordered_dq.md).
  static constexpr bool kScoresFirst = Config::kHeadDim <= 96;
  static constexpr bool kCountsIterations = true;
  static constexpr bool kReadsAhead = false;
  static constexpr bool kReadsLseAhead = false;
  static constexpr bool kStartsFirst = false;
  static constexpr bool kWideKeyRows = kStreamsTiles;
  static constexpr bool kWideQueryRows = kStreamsTiles && Config::kHeadDim <= 96;
};

}  // namespace flash::sm90::backward
