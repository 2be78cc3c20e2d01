// What the blocks of a cluster do together: reach each other's shared memory, and a barrier.
#pragma once

#include "../simt.h"

namespace simt {

// While this lives, addresses of shared memory mean those of another block of the cluster, and
// units are that block's. No thread may wait meanwhile.
class InBlock {
 public:
  explicit InBlock(uint32_t rank) {
    auto& blocks = running->cluster.blocks;
    expect(rank < blocks.size(), "there is no block ", rank, " in a cluster of ", blocks.size());
    expect(rank == running->rank || running->cluster.have_begun(), "block ", rank,
           " of the cluster may not have begun");
    expect(!blocks[rank].has_ended(), "block ", rank,
           " of the cluster has ended, and its shared memory with it");
    block = &blocks[rank];
  }
  ~InBlock() { block = running; }
  InBlock(InBlock const&) = delete;
  InBlock& operator=(InBlock const&) = delete;
};

inline void cluster_arrive() {
  ClusterBarrier& all = block->cluster.barrier;
  int& mine = thread().cluster_generation;
  expect(mine == 0, "it arrives at the cluster's barrier, and has not waited since the last time");
  mine = all.generation + 1;
  all.count();
}

inline void cluster_wait() {
  struct AllThere : Wait {
    ClusterBarrier const& all;
    int const generation;
    AllThere(ClusterBarrier const& all, int generation)
        : Wait(all.generation), all(all), generation(generation) {}
    bool over() const override { return all.generation >= generation; }
    std::string what() const override {
      return concat("the cluster's barrier (", all.missing, " of ", all.expected,
                    " threads to come)");
    }
  } const all_there{block->cluster.barrier, thread().cluster_generation};
  expect(all_there.generation > 0, "it waits at the cluster's barrier, and has not arrived");
  wait_for(all_there);
  thread().cluster_generation = 0;
}

}  // namespace simt
