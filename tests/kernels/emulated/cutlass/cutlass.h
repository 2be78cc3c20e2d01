// CUTLASS's header, but for what it says of the calling thread: on a host that it is the first.
#pragma once

#define canonical_lane_idx canonical_lane_idx_gpu
#define canonical_warp_idx_sync canonical_warp_idx_sync_gpu
#define canonical_warp_idx canonical_warp_idx_gpu
#define canonical_warp_group_idx canonical_warp_group_idx_gpu
#include_next <cutlass/cutlass.h>
#undef canonical_lane_idx
#undef canonical_warp_idx_sync
#undef canonical_warp_idx
#undef canonical_warp_group_idx

#include "intrinsics.h"

namespace cutlass {

inline int canonical_lane_idx() { return simt::lane(); }
inline int canonical_warp_idx() { return threadIdx.x / NumThreadsPerWarp; }
inline int canonical_warp_idx_sync() {
  return __shfl_sync(simt::kAllLanes, threadIdx.x / NumThreadsPerWarp, 0);
}
inline int canonical_warp_group_idx() {
  return __shfl_sync(simt::kAllLanes, threadIdx.x / NumThreadsPerWarpGroup, 0);
}

}  // namespace cutlass
