// V for products of codes: two warps of the producer's warpgroup transpose tiles (keys, columns) of
// them, on their way from the buffers that TMA fills to those that consumers read.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "sm90/forward/codes.h"

namespace flash::sm90::forward {

// Bytes 1 and 3 of both words, or bytes 0 and 2.
__device__ inline uint32_t every_other_byte(uint32_t a, uint32_t b, bool odd) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, odd ? 0x7531 : 0x6420);
#else
  uint32_t const x = odd ? a >> 8 : a, y = odd ? b >> 8 : b;
  return (x & 0xff) | (x >> 8 & 0xff00) | (y & 0xff) << 16 | (y << 8 & 0xff000000);
#endif
}

// In each sixteen keys, bytes 4t to 4t + 3 of a column are keys 2t, 2t + 1, 2t + 8 and 2t + 9. A
// product's accumulators have the scores of these keys in thread t of four, and its operand has
// these bytes: P needs no exchange between threads.
//
// A warp takes a patch of 32 keys by 16 columns at a time. ldmatrix gives a thread the codes of two
// keys and two columns in a word, every_other_byte makes a word for each column of two of these,
// and stmatrix writes rows of 16 keys. Of the eight rows of an stmatrix, four are even columns and
// four are odd ones: eight even ones would lie in half of the banks.
template <int kKeys, int kColumns>
class TileTransposer {
  using From = Chunks<kKeys, kColumns>;
  using To = Chunks<kColumns, kKeys>;

  int from, to;     // a lane's offsets in tiles, of the warp's first patch
  bool stores_odd;  // whether the first word that the lane stores is of the odd column

 public:
  static constexpr int kWarps = 2;
  static constexpr int kAcross = kColumns / 16 / kWarps;  // a warp's patches of the same keys
  static constexpr int kPatches = kAcross * (kKeys / 32), kAtOnce = kPatches % 2 == 0 ? 2 : 1;
  static constexpr int kRounds = kPatches / kAtOnce;
  static_assert(kColumns % (16 * kWarps) == 0 && kKeys % 32 == 0);
  uint32_t words[kAtOnce][4];

  __device__ explicit TileTransposer(int warp) {
    int const lane = WarpLanes{}.index();
    int const row = lane % 8, matrix = lane / 8;  // whose address stmatrix takes from this lane
    int const column = 2 * row + ((row >= 4) != (matrix % 2 == 1));
    from = From::offset(lane, warp);
    to = To::offset(warp * 16 + column, matrix / 2);
    stores_odd = lane / 4 >= 4;
  }

  __device__ void load(void const* codes, int round) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const patch = round * kAtOnce + i;
      int const offset = From::moved(from, patch / kAcross * 32, patch % kAcross * kWarps);
      auto const* const source = static_cast<char const*>(codes) + offset;
      SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(source), words[i][0], words[i][1],
                              words[i][2], words[i][3]);
    }
  }

  __device__ void store(void* transposed, int round) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const patch = round * kAtOnce + i;
      int const offset = To::moved(to, patch % kAcross * kWarps * 16, patch / kAcross * 2);
      auto* const target = static_cast<char*>(transposed) + offset;
      auto const& [a, b, c, d] = words[i];
      SM90_U32x4_STSM_N::copy(
          every_other_byte(a, b, stores_odd), every_other_byte(a, b, !stores_odd),
          every_other_byte(c, d, stores_odd), every_other_byte(c, d, !stores_odd),
          *reinterpret_cast<uint128_t*>(target));
    }
  }
};

// The warps that transpose, each its part of all tiles.
template <class Config>
struct Transposer {
  SharedStorage<Config>& smem;

  __device__ void run() {
    uint32_t tile = 0;
    for (uint32_t number = 0;; ++number) {
      typename SharedStorage<Config>::Description const at(number);
      smem.described.wait_full(at);
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      for (int left = block.range.count(); left > 0; --left) {
        transpose(tile++);
      }
      smem.described.release(at);
    }
  }

 private:
  __device__ void transpose(uint32_t tile) {
    RingPosition<Config::kCodeStages> const loaded(tile);
    RingPosition<Config::kStages> const at(tile);
    int const warp = static_cast<int>(threadIdx.x) / 32 % Config::kRewritingWarps;
    TileTransposer<Config::kBlockN, Config::kHeadDimV> transposer(warp);
    static_assert(transposer.kWarps == Config::kRewritingWarps);
    smem.code_rings.v.wait_full(loaded);
    transposer.load(smem.codes.v[loaded.stage], 0);
    smem.v_ring.wait_empty(at);
    transposer.store(smem.v[at.stage], 0);
#pragma unroll
    for (int round = 1; round < transposer.kRounds; ++round) {
      transposer.load(smem.codes.v[loaded.stage], round);
      transposer.store(smem.v[at.stage], round);
    }
    smem.v_ring.announce(at);
    smem.code_rings.v.release(loaded);
  }
};

}  // namespace flash::sm90::forward
