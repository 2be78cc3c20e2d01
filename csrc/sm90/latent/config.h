// Types of one sm90 kernel of latent attention: everything that follows from its row in the table
// of variants.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "decode/cluster_merge.h"
#include "decode/config.h"
#include "decode/tile_rows.h"
#include "sm90/pipeline.h"
#include "sm90/score_warpgroup.h"

namespace flash::sm90::latent {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, ScoreLevel kScores_>
struct LatentConfig {
  using Element = Element_;
  using Cached = Element;
  static constexpr int kHeadDim = kHeadDim_;    // of q and k, the rotated part
  static constexpr int kHeadDimV = kHeadDimV_;  // of qv, v and O
  static constexpr bool kLatent = true;
  // A row of the tiles of Q and K: the value's columns, then the rotated ones.
  static constexpr int kFirstColumns = kHeadDimV;
  static constexpr int kColumns = kHeadDimV + kHeadDim;
  static constexpr int kScoreColumns = kColumns;
  static constexpr int kBlockM = kBlockM_;  // rows of pack-GQA
  static constexpr int kBlockN = kBlockN_;  // keys of a step
  static constexpr int kUnit = kBlockN;
  static constexpr int kKeyAlignment = kBlockN;  // no box covers two pages
  static constexpr int kStages = kStages_;
  static constexpr ScoreLevel kScores = kScores_;

  // The first warpgroup computes P; the others half of O's columns each, and their first warp loads
  // keys.
  static constexpr int kValueWarpgroups = 2;
  static constexpr int kValueColumns = kHeadDimV / kValueWarpgroups;  // of a warpgroup
  static constexpr int kThreads = (1 + kValueWarpgroups) * kWarpgroup;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps_ == kWarps);
  static_assert(kBlockM == kWarpgroupRows && kBlockN == 64 && kHeadDim == 64 && kHeadDimV == 512);
  // setmaxnreg: all begin with 168. Q takes 124 of the first warpgroup, O 128 of the others.
  static constexpr int kAllRegisters = 168, kScoreRegisters = 184, kValueRegisters = 160;

  // ptxas begins accumulators at the 24th register, and keeps two: with S, 31 steps of Q fit. The
  // other five lie in shared memory.
  static constexpr int kRegisterSteps = 31;
  using Queries = RegisterQueries<Element, kRegisterSteps, kHeadDimV>;
  static constexpr int kSharedColumns = kColumns - Queries::kColumns;
  using MmaScores = MmaRegisterQueries<Element, kBlockN, kColumns>;
  using MmaShared = MmaBothShared<Element, kBlockN, kColumns>;
  using MmaValues = MmaSharedA<Element, kValueColumns, kBlockN>;
  // A tile: nine runs of 64 columns, of which the last, the rotated part, becomes P's place.
  static constexpr int kTile = kBlockN * kColumns;  // elements
  static constexpr int kRotatedPlace = kBlockN * kHeadDimV;
  using SmemLayoutK = SmemTiles<Element, kBlockN, kColumns, 1>;
  // Q's last columns. A narrow swizzle, because they begin anywhere.
  using SmemLayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW32_Atom<Element>{},
                                             Shape<Int<kBlockM>, Int<kSharedColumns>>{}));
  using SmemLayoutP = SmemTiles<Element, kBlockM, kBlockN, 1>;
  using SmemLayoutV = SmemTilesTransposed<Element, kBlockN, kValueColumns, 1>;

  static constexpr int kOutStride = kHeadDimV + 8;  // rows then lie in different banks
};

template <class Config>
struct LatentStorage {
  static constexpr int kStages = Config::kStages, kRows = Config::kBlockM;
  union {  // the results come when all keys have been read; a cluster's, when all its CTAs have
    alignas(1024) typename Config::Element keys[kStages][Config::kTile];
    alignas(16) float out[kRows][Config::kOutStride];
    decode::ClusterInbox<Config> inbox;
  };
  alignas(256) typename Config::Element q[kRows * Config::kSharedColumns];
  Ring<kStages> key_ring;
  Ring<1> q_ring;           // Q is emptied to registers
  Ring<kStages> p_ring;     // P takes no buffers of its own: it is emptied with its keys
  uint32_t exist[kStages];  // keys of a tile, as fragment_bits has them
  RowShifts<kStages> shifts;
  float out_scale[kRows];                                     // of O in the end
  float lse[kRows];                                           // in a cluster
  alignas(16) char work[sizeof(decode::DecodeWork<Config>)];  // read again at each use

  __device__ void init() {
    key_ring.init(Config::kValueWarpgroups * kWarpgroup / 32);
    p_ring.init(/*reading_warps=*/1, /*writing_warps=*/kWarpgroup / 32);
    q_ring.init(kWarpgroup / 32);
    cutlass::arch::fence_barrier_init();
  }
};

// With no keys, O may be stored while Q is still read from the last buffer.
template <class Config>
constexpr bool kSparesQueries = sizeof(LatentStorage<Config>::out) <=
                                (Config::kStages - 1) * sizeof(LatentStorage<Config>::keys[0]);

template <class Config>
constexpr int kSmemBytes = sizeof(LatentStorage<Config>);

}  // namespace flash::sm90::latent
