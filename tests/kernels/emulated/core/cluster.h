// Stands in for csrc/core/cluster.h.
#pragma once

#include "hopper/cluster.h"

namespace flash {

inline void sync_cluster() {
  simt::cluster_arrive();
  simt::cluster_wait();
}

class ClusterBlock {
 public:
  explicit ClusterBlock(int rank) : rank_(rank) {}

  template <class T>
  T read(T const& here) const {
    auto const offset = reinterpret_cast<char const*>(&here) - simt::block->smem;
    simt::InBlock const there(rank_);
    return *reinterpret_cast<T const*>(simt::block->smem + offset);
  }

 private:
  uint32_t rank_;
};

}  // namespace flash
