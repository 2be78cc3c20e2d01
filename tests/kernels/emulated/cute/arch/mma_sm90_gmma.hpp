// CuTe's header, but for what orders wgmmas. The instructions themselves are in
// cute/atom/mma_traits_sm90_gmma.hpp.
#pragma once

#define warpgroup_arrive warpgroup_arrive_gpu
#define warpgroup_wait warpgroup_wait_gpu
#define warpgroup_commit_batch warpgroup_commit_batch_gpu
#include_next <cute/arch/mma_sm90_gmma.hpp>
#undef warpgroup_arrive
#undef warpgroup_wait
#undef warpgroup_commit_batch

#include "hopper/wgmma.h"

namespace cute {

inline void warpgroup_arrive() { simt::warpgroup().fence(); }
inline void warpgroup_commit_batch() { simt::warpgroup().commit(); }

template <int kPending>
void warpgroup_wait() {
  static_assert(kPending >= 0 && kPending <= 7);
  simt::warpgroup().wait(kPending);
}

}  // namespace cute
