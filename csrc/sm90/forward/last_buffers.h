// O on its way out lies in the buffers of the row block's last keys, where shared memory has room
// for nothing else: the first warpgroup's in K's, the second's in V's. Both are free by then, or
// nearly: products start in turns, so the second's last with K is under way before the first's last
// with V, which in turn is before the second's. The loader gets them back when TMA has read them,
// which is asked after the next row block's first product was started.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/forward/shared_storage.h"

namespace flash::sm90 {

// As one of the two warpgroups sees it. All threads call its functions together.
template <class Config>
struct LastBuffers {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;

  SharedStorage<Config>& smem;
  int warpgroup;

  __device__ bool takes_keys() const { return warpgroup == 0; }

  // This warpgroup's products with the last K, or V, of row block `number` are done; the other's
  // are what its O waits for.
  __device__ void used_keys() const {
    if (!takes_keys()) {
      arrive(kKeys);
    }
  }
  __device__ void used_values(uint32_t number) const {
    if (takes_keys()) {
      arrive(values(number));
    }
  }

  // Neither waits for the other if one has no O.
  __device__ void take_none(uint32_t number) const {
    arrive(kKeys);
    arrive(values(number));
  }

  // Room for O, once all warps of both warpgroups are through with it.
  __device__ Element* take(Position last, uint32_t number) const {
    cutlass::arch::NamedBarrier::sync(kThreads, takes_keys() ? kKeys : values(number));
    return takes_keys() ? smem.k[last.stage] : smem.v[last.stage];
  }

  // Each warp for itself, as it stored.
  __device__ void give_back(Position last) const {
    if (threadIdx.x % 32 == 0) {
      tma_store_wait<0>();
    }
    if (takes_keys()) {
      smem.k_ring.release(last);
    } else {
      smem.v_ring.release(last);
    }
  }

 private:
  static constexpr int kThreads = 2 * kWarpgroup;
  // Named barriers behind those of the turns. V's take turns: the first warpgroup may be through
  // with a row block of one step while the second still waits for it to be through with the one
  // before. The other way about, its turn comes between.
  static constexpr int kKeys = Config::kConsumers;
  __device__ static int values(uint32_t number) { return kKeys + 1 + static_cast<int>(number % 2); }

  __device__ static void arrive(int barrier) {
    cutlass::arch::NamedBarrier::arrive(kThreads, barrier);
  }
};

}  // namespace flash::sm90
