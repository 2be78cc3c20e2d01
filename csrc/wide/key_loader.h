// Loads a step's keys and values from global to shared memory, several steps ahead.
#pragma once

#include "core/copy_async.h"
#include "decode/tile_rows.h"
#include "wide/config.h"

namespace flash::wide {

// All threads load each step together. A warp has neighbouring keys, eight lanes a key: each has 16
// bytes of every run of 64 columns.
template <class Config>
struct WideKeyLoader {
  using Element = typename Config::Element;
  static constexpr int kKeysOfWarp = Config::kBlockN / Config::kWarps;
  static constexpr int kLanesOfKey = 8;
  static_assert(kKeysOfWarp * kLanesOfKey == 32);

  FwdParams const& p;
  DecodeWork<Config> const& work;
  WideStorage<Config>& smem;
  int row;        // this lane's key of the step
  int col;        // and its columns of a run
  int key;        // its key of the sequence in the step that is looked up next
  PageSlot next;  // of its key in the step that is loaded next; read ahead

  __device__ WideKeyLoader(FwdParams const& p_, DecodeWork<Config> const& work_,
                           WideStorage<Config>& smem_)
      : p(p_),
        work(work_),
        smem(smem_),
        row(threadIdx.x / kLanesOfKey),
        col(threadIdx.x % kLanesOfKey * 8),
        key(work.begin + row) {
    look_up();
  }

  // Starts to load the next step. This is one cp.async group, even after the last step, because
  // the loop over keys counts groups.
  __device__ void load(int stage) {
    PageSlot const current = next;
    bool const exists = work.pages.exists(current);
    unsigned const lanes = __ballot_sync(0xffffffffu, exists);
    if (threadIdx.x % 32 == 0) {
      smem.exist[stage][threadIdx.x / 32] = keys_of(lanes);
    }
    look_up();
    Element* const target = smem.keys[stage].data() + typename Config::Tile{}(row, col);
    constexpr int kRunStride = Config::kBlockN * 64;  // elements of a run of the tile
    Element const* const v = work.v + p.v.offset(current.page, current.row, 0) + col;
    Element const* const k = work.k + p.k.offset(current.page, current.row, 0) + col;
#pragma unroll
    for (int run = 0; run < Config::kColumns / 64; ++run) {
      // Keys and columns that do not exist become zero, whatever lies there: 0 · NaN is NaN.
      constexpr int kFirstRuns = Config::kFirstColumns / 64;
      bool const of_value = (run < kFirstRuns) == Config::kLatent;
      int const from = (run < kFirstRuns ? run : run - kFirstRuns) * 64;
      Element const* const source = (of_value ? v : k) + from;
      int const columns = of_value ? p.head_dim_v : p.head_dim;
      copy_chunk_async<128>(*reinterpret_cast<uint128_t const*>(source),
                            *reinterpret_cast<uint128_t*>(target + run * kRunStride),
                            exists && col + from < columns);
    }
    cp_async_fence();
  }

  // Bits of the keys that exist in a step that has arrived, for all threads.
  __device__ unsigned existing(int stage) const {
    unsigned bits = 0;
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      bits |= smem.exist[stage][warp] << warp * kKeysOfWarp;
    }
    return bits;
  }

 private:
  // A bit a key, of bits of lanes.
  __device__ static unsigned keys_of(unsigned lanes) {
    unsigned bits = 0;
#pragma unroll
    for (int n = 0; n < kKeysOfWarp; ++n) {
      bits |= (lanes >> n * kLanesOfKey & 1) << n;
    }
    return bits;
  }

  // Only reads the table: whether the page exists is checked when it is needed, a step later.
  __device__ void look_up() {
    int const first = static_cast<int>(work.tile.info.row_k);
    next = key < work.end ? work.pages.slot(first + key) : PageSlot{PageSlot::kNoPage, 0};
    key += Config::kBlockN;
  }
};

}  // namespace flash::wide
