// Types of one sm90 forward kernel whose row blocks a pair of CTAs shares: everything that follows
// from its row in the table of variants.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "params/scores.h"
#include "sm90/paired_forward/row_block.h"
#include "sm90/pipeline.h"
#include "sm90/score_warpgroup.h"

namespace flash::sm90::forward {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, int kSecondN_, int kCachedBits_, ScoreLevel kScores_>
struct PairedForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kPair = 2;               // CTAs
  static constexpr int kBlockM = kBlockM_;      // rows of the pair
  static constexpr int kRows = kBlockM / kPair;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;  // buffers, for K and V alike
  static_assert(kRows == kWarpgroupRows && kBlockN == 64 && kStages == 3);
  static_assert(kHeadDim == 512 && kHeadDimV == 512, "K and V take the same buffers");
  static_assert(kScores_ == ScoreLevel::Plain && kSecondN_ == 0 && kCachedBits_ == 16);

  // The first warpgroup computes P; the others half of O's columns each, and their first warps load
  // K and V.
  static constexpr int kValueWarpgroups = 2;
  static constexpr int kValueColumns = kHeadDimV / kValueWarpgroups;  // of a warpgroup
  static constexpr int kValueWarps = kValueWarpgroups * kWarpgroup / 32;
  static constexpr int kThreads = (1 + kValueWarpgroups) * kWarpgroup;
  static_assert(kWarps_ * 32 == kThreads);
  // setmaxnreg: all begin with 168. Q takes 124 of the first warpgroup, O 128 of the others, and
  // ptxas begins accumulators at the 24th register.
  static constexpr int kScoreRegisters = 184, kValueRegisters = 160;

  // With S, 31 steps of Q's depth fit the registers; the last one lies in shared memory.
  static constexpr int kRegisterSteps = 31;
  using Queries = RegisterQueries<Element, kRegisterSteps, kHeadDim>;
  static constexpr int kSharedColumns = kHeadDim - Queries::kColumns;
  using MmaScores = MmaRegisterQueries<Element, kBlockN, kHeadDim>;
  using MmaShared = MmaBothShared<Element, kBlockN, kHeadDim>;
  using MmaValues = MmaSharedA<Element, kValueColumns, kBlockN>;
  static constexpr int kTile = kBlockN * kHeadDim;  // elements of K or V
  using SmemLayoutK = SmemTiles<Element, kBlockN, kHeadDim, 1>;
  using SmemLayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW32_Atom<Element>{},
                                             Shape<Int<kRows>, Int<kSharedColumns>>{}));
  using SmemLayoutP = SmemTiles<Element, kRows, kBlockN, 1>;
  using SmemLayoutV = SmemTilesTransposed<Element, kBlockN, kValueColumns, 1>;
  static constexpr int kProbabilityStages = 2;  // buffers for P
};

// K and V in the order of their use, counted by one ring: K of two blocks, then V of a block and K
// of the next but one. Each then takes the place of one whose products are over, and has the time
// of a whole step to arrive.
struct LoadOrder {
  __device__ static uint32_t key(int step) { return step == 0 ? 0 : 2 * step - 1; }
  __device__ static uint32_t value(int step) { return 2 * step + 2; }
};

template <class Config>
struct PairedForwardStorage {
  static constexpr int kStages = Config::kStages, kOfP = Config::kProbabilityStages;
  using Element = typename Config::Element;
  alignas(1024) Element tiles[kStages][Config::kTile];  // Q is in the last, until it is read
  alignas(1024) Element p[kOfP][Config::kRows * Config::kBlockN];
  alignas(256) Element q[Config::kRows * Config::kSharedColumns];
  Ring<kStages> tile_ring;
  Ring<1> q_ring;  // Q is emptied to registers
  Ring<kOfP> p_ring;
  Ring<1> end_ring;  // full: out_scale is there
  RowShifts<kOfP> shifts;
  uint32_t exist[kStages];         // keys of a tile of K, as fragment_bits has them
  float out_scale[Config::kRows];  // of O in the end
  alignas(16) char block[sizeof(PairedRowBlock<Config>)];  // read again at each use

  static constexpr uint32_t kAllKeys = (uint32_t{1} << Config::kBlockN / 4) - 1;

  __device__ void init() {
    constexpr int kScoreWarps = kWarpgroup / 32;
    // A tile is free when the readers of both CTAs are done. K has half as many as V; each counts
    // twice (release_keys).
    tile_ring.init(Config::kPair * Config::kValueWarps);
    static_assert(Config::kValueWarps == 2 * kScoreWarps);
    q_ring.init(Config::kPair * kWarpgroup);
    p_ring.init(Config::kValueWarps, kScoreWarps);
    end_ring.init(1, Config::kRows / kRowsOfThread);
    for (uint32_t& keys : exist) {
      keys = kAllKeys;
    }
    cutlass::arch::fence_barrier_init();
  }

  // Zeros in columns of a tile that no load reaches. thread: of `threads` that call it
  __device__ void clear_columns(int stage, int first_run, int thread, int threads) {
    constexpr int kRunElements = kRun<Config::kHeadDim> * Config::kBlockN, kChunk = 8;
    for (int i = first_run * kRunElements + thread * kChunk; i < Config::kTile;
         i += threads * kChunk) {
      *reinterpret_cast<uint4*>(tiles[stage] + i) = {0, 0, 0, 0};
    }
  }

  // A thread of the first warpgroup has its part of Q.
  __device__ void release_queries() {
#pragma unroll
    for (uint32_t rank = 0; rank < Config::kPair; ++rank) {
      q_ring.empty(0).arrive(rank);
    }
  }

  // All lanes of a warp that computes scores call it.
  __device__ void release_keys(int stage) {
    __syncwarp();
    int const lane = threadIdx.x % 32;
    if (lane < 2 * Config::kPair) {
      tile_ring.empty(stage).arrive(lane % Config::kPair);
    }
  }
};

template <class Config>
constexpr int kPairedSmemBytes = sizeof(PairedForwardStorage<Config>);

}  // namespace flash::sm90::forward
