// Stands in for CuTe's header: every cluster has one block.
#pragma once

#include <cute/config.hpp>

#include "intrinsics.h"

namespace cute {

inline void cluster_arrive_relaxed() { simt::wait(simt::block->barrier); }
inline void cluster_arrive() { simt::wait(simt::block->barrier); }
inline void cluster_wait() {}
inline void cluster_sync() { simt::wait(simt::block->barrier); }

inline dim3 cluster_grid_dims() { return {static_cast<unsigned>(gridDim.x), 1, 1}; }
inline dim3 cluster_id_in_grid() { return {static_cast<unsigned>(blockIdx.x), 0, 0}; }
inline dim3 block_id_in_cluster() { return {0, 0, 0}; }
inline dim3 cluster_shape() { return {1, 1, 1}; }
inline uint32_t block_rank_in_cluster() { return 0; }
inline uint32_t set_block_rank(uint32_t smem_address, uint32_t rank) {
  simt::expect(rank == 0, "clusters are not emulated");
  return smem_address;
}

struct ElectOneLaneIdReturnType {
  uint32_t is_leader;
  uint32_t leader_lane_id;
};

// The same lane each time, but not the first one in every block.
inline ElectOneLaneIdReturnType elect_one_leader_sync() {
  __syncwarp();
  int const elected = simt::block->order.elected;
  return {simt::lane() == elected, static_cast<uint32_t>(elected)};
}

inline uint32_t elect_one_sync() { return elect_one_leader_sync().is_leader; }

}  // namespace cute
