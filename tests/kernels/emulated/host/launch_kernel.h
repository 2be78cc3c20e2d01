// Stands in for csrc/host/launch_kernel.h: the same kernels, one cluster of blocks after the other,
// on the host. The build puts instructions.h before everything else.
#pragma once

#include <algorithm>
#include <array>
#include <functional>

#include "core/tile_scheduler.h"
#include "hopper/bulk_copies.h"
#include "host/device.h"
#include "host/error.h"
#include "host/variant.h"
#include "instructions.h"
#include "scheduler.h"

namespace flash {

// Of a block. A GPU has none with more.
class SharedMemory {
 public:
  char* data() { return bytes_; }

  void poison() { std::fill(words(), words_end(), simt::kPoison); }

  void check_behind(int bytes) {
    if (std::any_of(words() + bytes / 2, words_end(),
                    [](uint16_t w) { return w != simt::kPoison; })) {
      throw std::logic_error("a kernel writes behind its shared memory");
    }
  }

 private:
  uint16_t* words() { return reinterpret_cast<uint16_t*>(bytes_); }
  uint16_t* words_end() { return reinterpret_cast<uint16_t*>(std::end(bytes_)); }

  alignas(1024) char bytes_[232448];
};

// By rank in a cluster: Hopper's GPUs have none with more.
inline std::array<SharedMemory, 16> shared_memory;

// A launch orders nothing, except for kernels that wait for blocks launched before.
inline bool last_block_first = false;

struct LaunchShape {
  int64_t blocks;
  int threads;
  int smem_bytes;
  int cluster = 1;
  bool early = false;
};

// The launch's `number`-th cluster, whose first block is `first`.
inline void run_cluster(LaunchShape const& shape, int64_t number, int64_t first,
                        std::function<void()> const& body) {
  simt::Cluster cluster;
  for (int rank = 0; rank < shape.cluster; ++rank) {
    shared_memory[rank].poison();
    // An odd step from cluster to cluster: every rank gets every order.
    uint64_t const order = simt::first_order + number * (2 * shape.cluster - 1) + rank;
    cluster.add({.index = static_cast<int>(first + rank),
                 .threads = shape.threads,
                 .smem = shared_memory[rank].data(),
                 .smem_bytes = shape.smem_bytes,
                 .order = simt::Order::of(order)});
  }
  cluster.run(body);
  for (int rank = 0; rank < shape.cluster; ++rank) {
    shared_memory[rank].check_behind(shape.smem_bytes);
  }
}

template <auto kKernel, class... Args>
void launch_kernel(LaunchContext const&, LaunchShape shape, Args const&... args) {
  check(
      shape.cluster <= static_cast<int>(shared_memory.size()) && shape.blocks % shape.cluster == 0,
      "a GPU does not take ", shape.blocks, " blocks in clusters of ", shape.cluster);
  simt::late_stores.clear();  // of a launch that threw
  gridDim.x = static_cast<int>(shape.blocks);
  blockDim.x = shape.threads;
  std::function<void()> const body = [&] { kKernel(args...); };
  int64_t const clusters = shape.blocks / shape.cluster;
  for (int64_t i = 0; i < clusters; ++i) {
    run_cluster(shape, i, (last_block_first ? clusters - 1 - i : i) * shape.cluster, body);
  }
  simt::finish_stores();
}

}  // namespace flash
