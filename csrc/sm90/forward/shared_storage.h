#pragma once

#include "core/max_logits.h"
#include "sm90/forward/row_block.h"

namespace flash::sm90::forward {

// Where codes arrive that become elements. Tiles are apart from the rest, which has no alignment.
template <class Config, bool = Config::kConvertsKeys>
struct KeyCodes {};
template <class Config>
struct KeyCodes<Config, true> {
  alignas(1024) uint16_t k[Config::kCodeStages][Config::kBlockN * Config::kLoadedK];
};

template <class Config, bool = Config::kCodes>
struct Codes {};
template <class Config>
struct Codes<Config, true> : KeyCodes<Config> {
  alignas(1024) uint16_t v[Config::kCodeStages][Config::kBlockN * Config::kLoadedV];
};

template <class Config, bool = Config::kCodes>
struct CodeRings {};
template <class Config>
struct CodeRings<Config, true> {
  Ring<Config::kCodeStages> k;  // unused if K stays as it is
  Ring<Config::kCodeStages> v;
  // Which keys of a tile exist. The converter copies this to where consumers look.
  uint32_t exist[Config::kCodeStages][Config::kKeyWords];
};

// O has a buffer of its own, or is stored from registers: no other buffer waits for it, and the
// next row block's Q, K and V arrive while the last one is finished.
template <class Config>
struct SharedStorage {
  using Element = typename Config::Element;
  using Query = typename Config::Query;
  using Loaded = typename Config::Loaded;

  alignas(1024) Query q[Config::kConsumers * Config::kTileQ];
  alignas(1024) Query k[Config::kStages][Config::kTileK];
  alignas(1024) typename Config::ValueElement v[Config::kStages][Config::kTileV];
  [[no_unique_address]] Codes<Config> codes;
  alignas(1024) Element out[Config::kConsumers][Config::kTileO];
  // One ring for each warpgroup's rows: a warpgroup that is ahead of the others gets its next rows
  // at once. Full also announces the row block in `block`.
  Ring<1> q_ring[Config::kConsumers];
  Ring<Config::kStages> k_ring;
  Ring<Config::kStages> v_ring;
  // Which keys of each tile exist (pages.h); for two rounds of the ring, because K's buffer is free
  // before its scores are masked.
  uint32_t exist[2 * Config::kStages][Config::kKeyWords];
  // Four: the next row block may be announced while Q of one is waited for and the one before is
  // computed, and a late warp may still be storing the one before that. A warpgroup with late
  // stores has stored a row block before it frees the next one's Q, and so is no later than others.
  static constexpr int kDescriptions = 4;
  using Description = RingPosition<kDescriptions>;
  alignas(16) char block[kDescriptions][sizeof(RowBlock<Config>)];
  // Full: the description is there; empty: the warps that load from pages, and those that convert
  // codes, have read it. Other warps wait for Q, and the producer asks for the next description
  // when they are through with the one that was in its place.
  static constexpr int kPageWarps = 2;
  Ring<kDescriptions> described;
  Ring<1> asked;  // full: the next description is wanted
  int blocks;     // CTAs of the launch that share its tiles
  // As bits_in_order has them (core/max_logits.h), for calls that ask. In registers they would be
  // two more a thread, which kernels with score mods do not have.
  int maxima[Config::kMaxLogits == MaxLogitsIn::Shared ? Config::kConsumers * kWarpgroupRows : 1];
  [[no_unique_address]] CodeRings<Config> code_rings;

  // Where TMA puts K and V.
  __device__ auto& loaded_k() {
    if constexpr (Config::kConvertsKeys) {
      return codes.k;
    } else {
      return reinterpret_cast<Loaded(&)[Config::kStages][Config::kBlockN * Config::kLoadedK]>(k);
    }
  }
  __device__ auto& loaded_v() {
    if constexpr (Config::kCodes) {
      return codes.v;
    } else {
      return v;
    }
  }
  __device__ Ring<Config::kLoadedStagesK>& loaded_k_ring() {
    if constexpr (Config::kConvertsKeys) {
      return code_rings.k;
    } else {
      return k_ring;
    }
  }
  __device__ Ring<Config::kLoadedStagesV>& loaded_v_ring() {
    if constexpr (Config::kCodes) {
      return code_rings.v;
    } else {
      return v_ring;
    }
  }
  // Where the warp that loads K from pages says which keys of a tile exist.
  __device__ uint32_t* loaded_exist(uint32_t tile) {
    if constexpr (Config::kConvertsKeys) {
      return code_rings.exist[RingPosition<Config::kCodeStages>(tile).stage];
    } else {
      return exist[RingPosition<Config::kStages>(tile).in_two_rounds()];
    }
  }

  // The maximum of a consumer's row; its index is found anew, which keeps it out of registers.
  __device__ int& maximum(int r) {
    unsigned index = threadIdx.x;
    asm volatile("" : "+r"(index));
    return maxima[(index - kWarpgroup) / 4 * 2 + r];
  }

  __device__ RowBlock<Config>& row_block(uint32_t number) {
    return *reinterpret_cast<RowBlock<Config>*>(block[number % kDescriptions]);
  }

  // in_pages: the scheduler warp, too, has to let consumers begin.
  __device__ void init(int sharing_blocks, bool in_pages) {
    blocks = sharing_blocks;
    for (Ring<1>& ring : q_ring) {
      ring.init(kWarpgroup / 32, in_pages ? 2 : 1);
    }
    constexpr int kReaders = Config::kConsumerWarps, kConverters = Config::kRewritingWarps;
    k_ring.init(kReaders, Config::kConvertsKeys ? kConverters : 1);
    v_ring.init(kReaders, Config::kCodes ? kConverters : 1);
    if constexpr (Config::kCodes) {
      code_rings.k.init(kConverters);
      code_rings.v.init(kConverters);
      described.init(kConverters + (in_pages && !Config::kFp8 ? kPageWarps : 0));
    } else {
      described.init(kPageWarps);
    }
    asked.init(1);
    cutlass::arch::fence_barrier_init();
    for (auto& tile : exist) {
      for (uint32_t& keys : tile) {
        keys = ~uint32_t{0};
      }
    }
  }
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

}  // namespace flash::sm90::forward
