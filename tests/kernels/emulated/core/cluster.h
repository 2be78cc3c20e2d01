// Stands in for csrc/core/cluster.h.
#pragma once

#include "hopper/cluster.h"

namespace flash {

inline void sync_cluster() {
  simt::cluster_arrive();
  simt::cluster_wait();
}

inline void announce_to_cluster() { simt::cluster_arrive(); }
inline void wait_for_cluster() { simt::cluster_wait(); }

class ClusterBlock {
 public:
  explicit ClusterBlock(int rank) : rank_(rank) {}

  template <class T>
  void write(T& here, T x) const {
    auto const offset = reinterpret_cast<char*>(&here) - simt::block->smem;
    simt::InBlock const there(rank_);
    *reinterpret_cast<T*>(simt::block->smem + offset) = x;
  }

 private:
  uint32_t rank_;
};

}  // namespace flash
