// Stands in for CuTe's header. Clusters have one dimension.
#pragma once

#include <cute/config.hpp>

#include "hopper/cluster.h"
#include "intrinsics.h"

namespace cute {

inline void cluster_arrive_relaxed() { simt::cluster_arrive(); }
inline void cluster_arrive() { simt::cluster_arrive(); }
inline void cluster_wait() { simt::cluster_wait(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

inline uint32_t block_rank_in_cluster() { return simt::block->rank; }
inline dim3 block_id_in_cluster() { return {block_rank_in_cluster(), 0, 0}; }
inline dim3 cluster_shape() {
  return {static_cast<unsigned>(simt::block->cluster.blocks.size()), 1, 1};
}
inline dim3 cluster_grid_dims() { return {gridDim.x / cluster_shape().x, 1, 1}; }
inline dim3 cluster_id_in_grid() { return {blockIdx.x / cluster_shape().x, 0, 0}; }
// No emulated instruction goes to another block by such an address, and it is none in this block.
inline uint32_t set_block_rank(uint32_t smem_address, uint32_t rank) {
  simt::expect(rank < cluster_shape().x, "there is no block ", rank, " in the cluster");
  return rank == block_rank_in_cluster() ? smem_address : smem_address + (rank + 1 << 24);
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
