// Stands in for csrc/launch/launch_kernel.h: the same kernels on the host, one cluster of blocks
// after the other or several at the same time. The build puts instructions.h before everything
// else.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "core/tile_numbers.h"
#include "hopper/bulk_copies.h"
#include "launch/device.h"
#include "launch/error.h"
#include "launch/variant.h"
#include "instructions.h"
#include "launch_log.h"
#include "scheduler.h"

namespace flash {

// A block's shared memory. No GPU has more.
class SharedMemory {
 public:
  char* data() { return bytes_; }

  void poison() { std::fill(words(), words_end(), simt::kPoison); }

  void check_behind(int bytes) {
    if (std::any_of(words() + bytes / 2, words_end(),
                    [](uint16_t w) { return w != simt::kPoison; })) {
      throw std::logic_error("a kernel writes past its shared memory");
    }
  }

 private:
  uint16_t* words() { return reinterpret_cast<uint16_t*>(bytes_); }
  uint16_t* words_end() { return reinterpret_cast<uint16_t*>(std::end(bytes_)); }

  alignas(1024) char bytes_[232448];
};

// The shared memory of blocks that run at the same time: a cluster of Hopper's has no more.
inline std::array<SharedMemory, 16> shared_memory;

// A launch orders nothing, except for kernels that wait for blocks launched before.
inline bool last_block_first = false;

// How many blocks run at the same time, as chance has it: as many clusters as have no more; always
// one.
struct SideBySide {
  int blocks = 1;
  uint64_t seed = 0;
};
inline SideBySide side_by_side;

// While it lives, launches are so.
class RunSideBySide {
 public:
  explicit RunSideBySide(SideBySide how) { side_by_side = how; }
  ~RunSideBySide() { side_by_side = {}; }
  RunSideBySide(RunSideBySide const&) = delete;
  RunSideBySide& operator=(RunSideBySide const&) = delete;
};

struct LaunchShape {
  int64_t blocks;
  int threads;
  int smem_bytes;
  int cluster = 1;
  bool early = false;
};

// The clusters of a launch, which begin in their order.
struct LaunchedClusters {
  LaunchShape const& shape;
  int64_t count = shape.blocks / shape.cluster;
  int64_t begun = 0;
};

class Place : public simt::Place {
 public:
  Place(LaunchedClusters& launch, SharedMemory* memory) : launch_(launch), memory_(memory) {}

  std::unique_ptr<simt::Cluster> next() override {
    if (launch_.begun == launch_.count) {
      return nullptr;
    }
    LaunchShape const& shape = launch_.shape;
    int64_t const number = launch_.begun++;
    int64_t const at = last_block_first ? launch_.count - 1 - number : number;
    auto cluster = std::make_unique<simt::Cluster>();
    for (int rank = 0; rank < shape.cluster; ++rank) {
      memory_[rank].poison();
      // An odd step from cluster to cluster: every rank gets every order.
      uint64_t const order = simt::first_order + number * (2 * shape.cluster - 1) + rank;
      cluster->add({.index = static_cast<int>(at * shape.cluster + rank),
                    .threads = shape.threads,
                    .smem = memory_[rank].data(),
                    .smem_bytes = shape.smem_bytes,
                    .order = simt::Order::of(order)});
    }
    return cluster;
  }

  void has_ended() override {
    for (int rank = 0; rank < launch_.shape.cluster; ++rank) {
      memory_[rank].check_behind(launch_.shape.smem_bytes);
    }
  }

 private:
  LaunchedClusters& launch_;
  SharedMemory* memory_;  // of its blocks
};

template <auto kKernel, class... Args>
void launch_kernel(LaunchContext const&, LaunchShape shape, Args const&... args) {
  check(
      shape.cluster <= static_cast<int>(shared_memory.size()) && shape.blocks % shape.cluster == 0,
      "a GPU does not take ", shape.blocks, " blocks in clusters of ", shape.cluster);
  if (shape.blocks == 0 || launch_log.takes(shape.early)) {
    return;
  }
  simt::late_stores.clear();  // of a launch that threw
  gridDim.x = static_cast<int>(shape.blocks);
  blockDim.x = shape.threads;
  std::function<void()> const body = [&] { kKernel(args...); };
  LaunchedClusters launch{shape};
  std::vector<std::unique_ptr<simt::Place>> places;
  int const blocks = std::clamp<int>(side_by_side.blocks, shape.cluster, shared_memory.size());
  for (int first = 0; first + shape.cluster <= blocks; first += shape.cluster) {
    places.push_back(std::make_unique<Place>(launch, &shared_memory[first]));
  }
  simt::run_places(places, side_by_side.seed, body);
  simt::finish_stores();
}

}  // namespace flash
