// Types of one sm90 backward kernel: everything that follows from its row in the variant table.
#pragma once

#include "core/score_level.h"
#include "params/row_parts.h"
#include "params/ordered_dq.h"
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
  static constexpr int kKeys = kBlockN;  // of a thread block
  static constexpr ScoreLevel kScores = kScores_;
  static constexpr int kStages = kStages_;  // buffers for Q
  static_assert(kStages >= 2);  // the next row block's scores need its Q beside this one's
  static constexpr int kDoutStages = kStages;  // buffers for dO
  static constexpr int kScoreStages = 2;       // buffers for dS

  // The first warpgroup loads, each of the others computes 64 keys.
  static constexpr int kConsumers = kBlockN / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr int kAdders = 1;  // thread blocks that add a tile's dQ
  static constexpr bool kKvPersistent = false, kOrderedDq = false, kFindsDelta = false;
  static constexpr bool kOrdersDq = false;  // the first and the last to add to dQ differ
  static constexpr bool kStreamsTiles = false;
  static constexpr int kKeyStages = 1;  // buffers for K
  // Lanes store 16 bytes each: of dK and dV, and of dQ.
  static constexpr bool kWideKeyRows = false, kWideQueryRows = false;
  static constexpr bool kRowParts = has_row_parts(kHeadDim, kHeadDimV, kScores == ScoreLevel::Plain);
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static_assert(kWarps_ * 32 == kThreads && kBlockN % kWarpgroupRows == 0);
  static_assert(kConsumers == 2);
  // setmaxnreg: what the loader does without goes to the others.
  static constexpr int kLoaderRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // Sᵀ and dPᵀ, 64 keys of a warpgroup by kBlockM rows
  using MmaScores = MmaBothShared<Element, kBlockM, kHeadDim>;
  // dK and dV: dSᵀ and Pᵀ in registers, times Q and dO
  using MmaKeys = MmaRegisterA<Element, kHeadDim, kBlockM>;
  using MmaValues = MmaRegisterA<Element, kHeadDimV, kBlockM>;

  // dQ: each warpgroup has 64 rows, or of the same 64 rows half of the columns. Where half of them
  // is not whole runs, both compute what is left, and each adds its half.
  static constexpr bool kShareRows = kBlockM == kConsumers * kWarpgroupRows;
  static_assert(kShareRows || kBlockM == kWarpgroupRows);
  static constexpr int kQueryColumns =
      kShareRows ? kHeadDim : ceil_div(kHeadDim / kConsumers, kRun<kHeadDim>) * kRun<kHeadDim>;
  using MmaQuery = MmaAcross<Element, kQueryColumns, kBlockN>;
  static constexpr int kRunK = kRun<kHeadDim>;

  // Details of a iteration of which ptxas makes faster or slower code, each as it was measured for the
  // head dim (docs/kernels/sm90_backward.md, Details of a iteration).
  static constexpr bool kPlain = kScores == ScoreLevel::Plain;
  // The scores of the next row block are started before this one's dQ is added, not behind it.
  static constexpr bool kScoresFirst = kPlain || kHeadDim <= 96;
  // The iterations of a tile are counted, instead of told by each whether there is another.
  static constexpr bool kCountsIterations = kPlain;
  // All of dP's product is started before the first exponential.
  static constexpr bool kStartsFirst = kPlain && kHeadDim == 64;
  // D, and where dQ goes, are read before the product is waited for that they are used behind.
  static constexpr bool kReadsAhead = kPlain && kHeadDim >= 96;
  // Calls that add to dQ's sums have a loop of their own.
  static constexpr bool kOwnLoopToAdd = kReadsAhead;
  // LSE of the next row block is read before its scores are started.
  static constexpr bool kReadsLseAhead = kPlain && kHeadDim == 128;

  // Scores with hooks have factors of 16 bits, each hook a loop of its own, and masked and whole
  // row blocks one body (hooked_tile.h).
  static constexpr bool kHookedTiles = !kPlain && kHeadDim == 64;
  // Elsewhere a softcap alone has a loop of its own, where that is faster, and one body as well
  // (lone_tile.h).
  static constexpr bool kLoneCap = !kPlain && kHeadDim == 128;
  // Details of the loop for a softcap alone, where there is one. 4k causal, H200, of plain: d 64
  // 0.740 with those of the other hooks, 0.749 with these; d 128 0.730 in one loop for all hooks,
  // 0.820.
  struct CapLoop {
    static constexpr bool kStartsFirst = kHeadDim == 64;
    static constexpr bool kCountsIterations = kHeadDim == 64;
    static constexpr bool kReadsAhead = true;
    // The next row block's scores are started before this one's dK, and the largest of them, which
    // decides how tanh is computed, is looked for under it. Of what is read ahead D remains.
    static constexpr bool kScansAhead = kHeadDim == 128;
  };
  // Probabilities of hooked tiles are multiples of 2 to the power of minus this, for which LSE is
  // less. They are at most 1, or little more where LSE is large and rounded: of their products with
  // derivatives, in such units, fp16 has 11 bits from 2^-26 to 16.
  static constexpr int kProbabilityLog2 = kHookedTiles ? 12 : 0;
  static constexpr float kProbabilityUnit = 1 << kProbabilityLog2;

  // As rows, for products that reduce over the columns, and the same memory the other way round.
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

// The same, or a pair's, for a kernel whose thread blocks go through columns. As a flag of the call
// this took 2 to 12% of others' time (H200, d 96 most): ptxas makes other code of the whole loop.
template <class Config>
struct KvPersistentConfig : Config {
  static constexpr bool kKvPersistent = true, kOrdersDq = true;
  static constexpr bool kRowParts = false;

  // Of a tile's details some do not suit d 128 here: 512 keys, causal, of FA3 0.98 with, 1.09
  // without.
  static constexpr bool kSuit = Config::kHeadDim <= 96;
  static constexpr bool kScoresFirst = Config::kScoresFirst && kSuit;
  static constexpr bool kCountsIterations = Config::kCountsIterations && kSuit;
  static constexpr bool kReadsAhead = Config::kReadsAhead && kSuit;
  static constexpr bool kReadsLseAhead = Config::kReadsLseAhead && kSuit;
};

// The same for a kernel whose key blocks hand sums of dQ on.
template <class Config>
struct OrderedDqConfig : Config {
  static constexpr bool kOrderedDq = true, kOrdersDq = true;
  static constexpr bool kRowParts = false;

  // Tiles are one stream of iterations: a tile's last one starts the next tile's first scores, whose
  // iteration brings this one's last dQ to its row block, so that between tiles nobody waits for a
  // product with nothing else to do. There K of both is wanted, so it has two buffers. Pairs have
  // no room for them.
  static constexpr bool kStreamsTiles = Config::kAdders == 1;
  static constexpr int kKeyStages = kStreamsTiles ? 2 : 1;

  // A warp finds D of rows ahead of the tiles: rows of dO and O that come at a time, and buffers.
  // At d 128 they have the room of a third buffer for dO, which is worth half a percent.
  static constexpr bool kFindsDelta = ordered_dq_finds_delta(Config::kHeadDim);
  static constexpr bool kDeltaOfDout = Config::kHeadDim == 128;
  static constexpr int kDoutStages = kDeltaOfDout ? 2 : Config::kStages;
  static constexpr bool kFewDeltaRows = kDeltaOfDout || Config::kHeadDimV > 128;
  static constexpr int kDeltaRows = kFewDeltaRows ? 8 : Config::kHeadDim == 96 ? 32 : 16;
  static constexpr int kDeltaStages = Config::kAdders > 1 ? 2 : 3;
  // Enough for it where those who compute do not miss them.
  static constexpr bool kLoadsWide = Config::kHeadDim == 96;
  static constexpr int kLoaderRegisters = kLoadsWide ? 40 : Config::kLoaderRegisters;
  static constexpr int kConsumerRegisters = kLoadsWide ? 232 : Config::kConsumerRegisters;

  // As measured here (docs/kernels/sm90_backward.md, Relays).
  static constexpr bool kScoresFirst = Config::kHeadDim <= 96;
  static constexpr bool kCountsIterations = true;
  static constexpr bool kReadsAhead = false;
  static constexpr bool kReadsLseAhead = false;
  static constexpr bool kStartsFirst = false;
  static constexpr bool kWideKeyRows = kStreamsTiles;
  static constexpr bool kWideQueryRows = kStreamsTiles && Config::kHeadDim <= 96;
};

}  // namespace flash::sm90::backward
