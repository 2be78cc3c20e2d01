// Types of one sm90 forward kernel: everything that follows from its row in the variant table.
#pragma once

#include <algorithm>
#include <type_traits>

#include "params/scores.h"
#include "sm90/tensor_core.h"

namespace flash::sm90::forward {

// A forward tile, as its row in the variant table has it, and bytes of its numbers.
struct ForwardTileShape {
  int head_dim;    // of Q and K
  int head_dim_v;  // of V and O
  int block_m;
  int block_n;
  int stages;
  int element_bytes = 2;  // of Q, K and V, as products read them

  // Bytes of Q, and of all buffers of K and V.
  constexpr int bytes() const {
    return element_bytes * (block_m * head_dim + stages * block_n * (head_dim + head_dim_v));
  }
};

// Columns of O, in runs of 64, that shared memory has room for beside Q, K and V, and codes of
// these (in bytes): 227 KiB, less barriers.
constexpr int staged_columns(ForwardTileShape const& tile, int codes) {
  constexpr int kRun = 64, kBytes = 224 << 10;
  if (tile.head_dim_v % kRun != 0) {
    return 0;
  }
  int const room = kBytes - tile.bytes() - codes;
  return std::min(room / (tile.block_m * kRun * 2) * kRun, tile.head_dim_v);
}

// Buffers for codes that become elements or are transposed: `most`, or as many as there is room
// for. codes: bytes of one.
constexpr int code_stages(ForwardTileShape const& tile, int codes, int most) {
  constexpr int kBytes = 225 << 10;  // with barriers 227 KiB
  return std::clamp((kBytes - tile.bytes()) / std::max(codes, 1), 1, most);
}

// P·V, by so many columns of V at a time. Products of codes reduce along columns alone: V is
// transposed (transposer.h).
template <class Element, int kKeys, int kHeadDimV, int kStages, int kColumns, bool kFp8,
          bool kPagesOnly>
struct ValueProduct {
  using Mma = MmaRegisterA<Element, kColumns, kKeys>;
  using Layout = typename KeyTiles<kPagesOnly, Element, kKeys, kHeadDimV, kStages>::Transposed;
};
template <class Element, int kKeys, int kHeadDimV, int kStages, int kColumns, bool kPagesOnly>
struct ValueProduct<Element, kKeys, kHeadDimV, kStages, kColumns, true, kPagesOnly> {
  using Mma = MmaRegisterQueries<float_e4m3_t, kColumns, kKeys>;
  using Layout = SmemTiles<float_e4m3_t, kHeadDimV, kKeys, kStages, kRun<kKeys / 2>>;
};

enum class KeyStorage { Any, SmallPages, LargePages };

// Where a kernel keeps rows' largest logits: in registers for every call, which only asking calls
// are launched with, or in shared memory if the call asks.
enum class MaxLogitsIn { None, Registers, Shared };

// kSecondN_: keys of a second tile, in a kernel of its own (`Second`); 0: there is none.
// kCachedBits_: of K and V: 16, or 8 of codes (codes.h).
// The others make kernels of their own, because what they take would slow the first one down:
// kPackGqa_: pack-GQA, rows are queries with several heads each (core/work_tile.h).
// kSplit_: in addition, a row block has one KV split.
// kKeys_: keys are in pages only, and lie in shared memory as their boxes bring them (pages.h).
// kAsked_: for calls that ask for largest logits; kernels with score mods serve these as they are.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kStages_, int kSecondN_, int kCachedBits_, ScoreLevel kScores_,
          bool kPackGqa_ = false, bool kSplit_ = false, KeyStorage kKeys_ = KeyStorage::Any,
          bool kAsked_ = false>
struct ForwardConfig {
  // The type of Q and K in their product. With kFp8 Q, K, V and P are codes, and products take them
  // as they are (fp8_consumer.h).
  using Query = Element_;
  static constexpr bool kFp8 = std::is_same_v<Query, float_e4m3_t>;
  using Element = std::conditional_t<kFp8, half_t, Query>;  // of O: half_t may stand for bfloat16_t
  static constexpr int kHeadDim = kHeadDim_;                // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;              // of V and O
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr ScoreLevel kScores = kScores_;
  static constexpr int kStages = kStages_;  // buffers for K, and for V
  static constexpr bool kPackGqa = kPackGqa_;
  using PackGqa = ForwardConfig<Element_, kHeadDim_, kHeadDimV_, kBlockM_, kBlockN_, kWarps_,
                                kStages_, kSecondN_, kCachedBits_, kScores_, true>;
  static constexpr bool kSplit = kSplit_;
  using Split = ForwardConfig<Element_, kHeadDim_, kHeadDimV_, kBlockM_, kBlockN_, kWarps_,
                              kStages_, kSecondN_, kCachedBits_, kScores_, true, true>;
  static constexpr int kSecondN = kSecondN_;
  static constexpr bool kPagesOnly = kKeys_ != KeyStorage::Any;
  static constexpr bool kLargePages = kKeys_ == KeyStorage::LargePages;
  template <KeyStorage kKeys>
  using SecondOf = ForwardConfig<Element_, kHeadDim_, kHeadDimV_, kBlockM_, kSecondN_, kWarps_,
                                 kStages_, 0, kCachedBits_, kScores_, false, false, kKeys>;
  using Second = SecondOf<KeyStorage::Any>;
  using Asked =
      ForwardConfig<Element_, kHeadDim_, kHeadDimV_, kBlockM_, kBlockN_, kWarps_, kStages_,
                    kSecondN_, kCachedBits_, kScores_, kPackGqa_, false, KeyStorage::Any, true>;
  // Whether K and V are codes. Then no call asks for largest logits.
  static constexpr bool kCodes = kCachedBits_ == 8;
  static_assert(kCodes || !kFp8);
  static constexpr MaxLogitsIn kMaxLogits = kCodes                          ? MaxLogitsIn::None
                                            : kScores_ != ScoreLevel::Plain ? MaxLogitsIn::Shared
                                            : kAsked_                       ? MaxLogitsIn::Registers
                                                                            : MaxLogitsIn::None;
  // Whether calls that ask for largest logits get a kernel of their own, `Asked`.
  static constexpr bool kIsAsked =
      !kCodes && kMaxLogits == MaxLogitsIn::None && !kSplit_ && kKeys_ == KeyStorage::Any;
  // The type of P and V in their product. Codes become fp16 in one instruction a pair, bf16 in
  // four; P loses less.
  using WideValue = std::conditional_t<kCodes, half_t, Element>;
  using ValueElement = std::conditional_t<kFp8, Query, WideValue>;
  using Out = std::conditional_t<kSplit, float, Element>;  // what rows are stored as

  // The first warpgroup has the producer warps; each of the next, a consumer, computes 64 rows; the
  // last one converts codes to 16 bits. With kFp8, two of the producer warps transpose V instead.
  static constexpr int kConsumers = kBlockM / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr bool kConvertsKeys = kCodes && !kFp8;
  static constexpr int kRewritingWarps = kFp8 ? 2 : kCodes ? kWarpgroup / 32 : 0;
  static constexpr int kThreads = (1 + kConsumers + kConvertsKeys) * kWarpgroup;
  static_assert(kWarps_ * 32 == kThreads);
  static_assert(kConsumers == 2 || kConsumers == 3);
  // setmaxnreg: consumers get the registers that the producer's warpgroup gives up. With two
  // consumers 24 leave each of these 240, of 168 at launch. With three, 32 leave 160, of 128: with
  // 24 the tile look-up would spill.
  static constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : kFp8 ? 40 : 24;
  static constexpr int kConverterRegisters = kScores == ScoreLevel::Plain ? 56 : 40;
  static constexpr int kConsumerRegisters = kConvertsKeys     ? 264 - kConverterRegisters
                                            : kConsumers == 3 ? 160
                                            : kFp8            ? 232
                                                              : 240;

  // ptxas has 128 registers for an instruction of 512 threads.
  using MmaScores = MmaBothShared<Query, (kFp8 && kBlockN > 128 ? kBlockN / 2 : kBlockN), kHeadDim>;
  static constexpr int kProductColumns = kThreads == 512 ? std::min(kHeadDimV, 128) : kHeadDimV;
  // Columns of O in one product of codes.
  static constexpr int kPartColumns = kHeadDimV % 128 == 0 ? 128 : kHeadDimV % 64 == 0 ? 64 : 96;
  using Values = ValueProduct<WideValue, kBlockN, kHeadDimV, kStages,
                              kFp8 ? kPartColumns : kProductColumns, kFp8, kPagesOnly>;
  using MmaValues = typename Values::Mma;
  using MmaOut = MmaRegisterA<Element, kHeadDimV, kBlockN>;  // whose registers O has
  // A run of codes has twice as many columns.
  static constexpr int kLoadedQ = kFp8 ? kHeadDim / 2 : kHeadDim;
  using SmemLayoutQ = SmemTiles<Query, kWarpgroupRows, kHeadDim, kConsumers, kRun<kLoadedQ>>;
  using SmemLayoutK = std::conditional_t<
      kFp8, SmemTiles<Query, kBlockN, kHeadDim, kStages, kRun<kLoadedQ>>,
      typename KeyTiles<kPagesOnly, Element, kBlockN, kHeadDim, kStages>::Layout>;
  using SmemLayoutV = typename Values::Layout;

  // The wait for P·V lies between the two rows' exponentials, not after both, where a block has so
  // many keys. H200, of FA3 over eight sizes: d 64 1.087 instead of 1.076, d 128 0.963 instead of
  // 0.940, d 192 1.001 instead of 0.993; d 256, with 80 keys, would have 0.992 instead of 0.996. d
  // 96, 1.073 instead of 1.075, is no reason for a rule of its own.
  static constexpr bool kWaitsBetweenRows = kBlockN > 80;

  static constexpr ForwardTileShape kTile{kHeadDim, kHeadDimV, kBlockM,
                                          kBlockN,  kStages,   sizeof(Query)};
  static constexpr int kTileQ = kWarpgroupRows * kHeadDim;  // elements
  static constexpr int kTileK = kBlockN * kHeadDim;
  static constexpr int kTileV = kBlockN * kHeadDimV;
  // What TMA brings of K and V: their elements, or pairs of codes. A converter makes elements of
  // those, or with kFp8 transposes V's. Two buffers for codes hide a load's latency.
  using Loaded = std::conditional_t<kCodes, uint16_t, Element>;
  static constexpr int kConverted =
      kCodes ? kBlockN * ((kConvertsKeys ? kHeadDim : 0) + kHeadDimV) : 0;  // bytes
  static constexpr int kCodeStages = code_stages(kTile, kConverted, kFp8 ? kStages : 2);
  static constexpr int kLoadedStagesK = kConvertsKeys ? kCodeStages : kStages;
  static constexpr int kLoadedStagesV = kCodes ? kCodeStages : kStages;
  static constexpr int kLoadedK = kCodes ? kHeadDim / 2 : kHeadDim;  // columns
  static constexpr int kLoadedV = kCodes ? kHeadDimV / 2 : kHeadDimV;
  // TMA stores as many runs of O's columns as shared memory has room for (store_tile.h). Other
  // columns are stored from registers. H200, d 192/128, of FA3: 1.022 without TMA, 1.028 with 64
  // columns by TMA.
  static constexpr int kTileColumns = kPackGqa ? 0 : staged_columns(kTile, kCodeStages* kConverted);
  static constexpr bool kStoresTiles = kTileColumns > 0;
  // A row block's O is stored under the next one's first scores, all of it through those runs, one
  // after the other: only at 256 columns, whose store is the longest, and where there is room for
  // two runs, so that one is filled while the other leaves. H200, d 256, of FA3: 512 keys full
  // 1.040 instead of 0.986, causal 1.048 instead of 1.050. d 128 lost 1%, other head dims gained
  // 0.5% at most.
  static constexpr bool kStoresLate =
      !kCodes && kScores == ScoreLevel::Plain && kHeadDimV == 256 && kTileColumns >= 128;
  static constexpr int kTileO =
      kStoresTiles ? kWarpgroupRows * kTileColumns : 8;  // or next to none

  // Warps that load from pages have eight keys in two lanes each, or a box in one (pages.h).
  static constexpr bool kServesPages = kPagesOnly || kBlockN <= 128;
  static constexpr int kKeyWords = (kBlockN / 4 + 31) / 32;  // bits of a thread's keys
};

}  // namespace flash::sm90::forward
